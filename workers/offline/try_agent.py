"""Try an agent that is a program: one episode in which all that the sampler writes is a scripted turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from backends.hf.tokenizer import TextCodec
from specs.schema.environment import EnvironmentSection
from workers.chat.chat_renderer import ChatRenderer
from workers.chat.chat_turns import chats_by_tools
from workers.environments.environment_pool import Described, EnvironmentPool
from workers.episodes.agent_episode import AgentEpisode
from workers.episodes.episode_runner import gateway_for_agents
from workers.episodes.trajectory import Sample, SampledTurn, Task

TRIAL_S = 60.0  # for the program's own time
_ANSWER = "Yes."

Report = Callable[..., None]


class AgentTrial:
    """Plays an episode, and says what is wrong with it."""

    def __init__(self, section: EnvironmentSection, row: Mapping[str, Any], seed: int, turn_tokens: int) -> None:
        limits = {"max_turns": 1, "episode_timeout_s": min(section.episode_timeout_s, TRIAL_S)}
        self.section, self.turn_tokens = section, turn_tokens
        self._trial = section.model_copy(update=limits)
        self._task = Task(0, 0, 0, 0, False, seed, [0], row["values"], row["messages"], section.name)
        self._prompts: list[int] = []  # their lengths

    async def run(
        self,
        pool: EnvironmentPool,
        described: Described,
        texts: tuple[TextCodec, ChatRenderer],
        report: Report,
        key: str,
    ) -> dict[str, Any]:
        """Return what was found. `report` is told of problems: their key, what, and what to do."""
        codec, renderer = texts
        answer = codec.encode([_ANSWER], rendered=True)[0] + [codec.end_id or 0]

        async def draw(task: Task, number: int, sample: Sample, limit: int) -> SampledTurn:
            self._prompts.append(len(sample.tokens))
            return SampledTurn(answer, [0.0] * len(answer), [0] * len(answer), True)

        chats = chats_by_tools(codec, renderer)
        gateway = gateway_for_agents()
        await gateway.start()
        try:
            episode = AgentEpisode(self._task, self._trial, described, chats, draw, self.turn_tokens, gateway)
            found = await episode.run(pool)
        finally:
            await gateway.close()
        self._judge(episode, found.stop, found.why, report, key)
        tools = sum(len(turn.request.tools) for turn in episode.tree.turns)
        wire = next((turn.request.wire for turn in episode.tree.turns), "")
        return {
            "mode": "program",
            "prompt_tokens": next(iter(self._prompts), None),
            "turn": _ANSWER if self._prompts else "",
            "reply": f"{wire}, {tools} tools; exit code {found.notes.get('exit_code')}" if self._prompts else None,
        }

    def _judge(self, episode: AgentEpisode, stop: str, why: str, report: Report, key: str) -> None:
        most = self.section.max_episode_tokens
        if self._prompts:
            prompt, turn = self._prompts[0], self.turn_tokens
            if prompt + turn > most:
                message = f"the agent's first request has {prompt} tokens, and a turn up to {turn}"
                report(f"{key}.max_episode_tokens", message, f"use at least {prompt + turn}")
            elif why:
                report(f"{key}.agent", f"after one turn, {why}", "see what it prints", refuses=False)
            elif stop == "timeout":
                message = f"did not end within {self._trial.episode_timeout_s:g} s after one turn"
                report(f"{key}.agent", message, "its own time is bounded by episode_timeout_s", refuses=False)
        elif stop == "context_overflow":
            message = f"the agent's first request has more tokens: {episode.longest}"
            report(f"{key}.max_episode_tokens", message, f"use at least {episode.longest + self.turn_tokens}")
        elif why:
            report(f"{key}.agent", why, "run the command by hand to see why")
        else:
            message = f"did not ask the model within {self._trial.episode_timeout_s:g} s"
            report(f"{key}.agent", message, "it must ask at OPENAI_BASE_URL or ANTHROPIC_BASE_URL")
