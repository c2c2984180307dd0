"""An agent's episode behind the gateway, whose turns are scripted but go through parser, tree and masks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from backends.hf.tokenizer import TextCodec, load_codec
from rlctl.models.paths import BUILTIN_FOLDER
from specs.schema.environment import EnvironmentSection
from workers.chat.chat_renderer import ChatRenderer, renderer_of
from workers.chat.chat_turns import ChatTurns
from workers.environments.environment_pool import Described
from workers.episodes.agent_episode import AgentEpisode
from workers.episodes.trajectory import Sample, SampledTurn, Task
from workers.gateway.gateway_server import Gateway

END = "<|im_end|>"
TASK = "What is 6*7?"
AGENT = Described("agent", (), gives_reward=False)
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tell the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def call(name: str = "weather", **arguments: Any) -> str:
    """A call as the model writes it, with spaces that no harness would write."""
    return f'<tool_call>\n{{"name":  "{name}", "arguments":  {json.dumps(arguments)}}}\n</tool_call>{END}'


@cache
def texts(model: str = "tiny-chat") -> tuple[TextCodec, ChatRenderer]:
    codec = load_codec(str(BUILTIN_FOLDER / model), trust_remote_code=False)
    return codec, renderer_of(codec)


@cache
def chat(model: str, tools: str) -> ChatTurns:
    """The chat template with some tools, as JSON."""
    return ChatTurns(*texts(model), json.loads(tools))


@dataclass
class Sampler:
    """Writes given turns, the last one for ever, and keeps a log of its own: every token that it drew."""

    turns: list[str]
    model: str = "tiny-chat"
    wait_s: float = 0.0
    log: list[tuple[list[int], list[int]]] = field(default_factory=list)  # prompt, what was drawn
    gate: asyncio.Event | None = None  # closed: it waits
    stop: str = END  # text that ends a turn

    async def __call__(self, task: Task, number: int, sample: Sample, limit: int) -> SampledTurn:
        codec, _ = texts(self.model)
        text = self.turns.pop(0) if len(self.turns) > 1 else self.turns[0]
        tokens = codec.encode([text], rendered=True)[0][:limit]
        self.log.append(([*sample.tokens], tokens))
        if self.gate is not None:
            await self.gate.wait()
        await asyncio.sleep(self.wait_s)
        finished = tokens[-1] == codec.tokenizer.eos_token_id or codec.decode([tokens])[0].endswith(self.stop)
        return SampledTurn(tokens, [-0.5] * len(tokens), [3] * len(tokens), finished)


@dataclass
class Served:
    """An episode that is open: its addresses and key."""

    gateway: Gateway
    episode: AgentEpisode
    sampler: Sampler
    variables: dict[str, str]
    clients: list[Any] = field(default_factory=list)

    def client(self, kind: Any) -> Any:
        """A client of OpenAI's or Anthropic's, which is closed with the episode."""
        base = self.openai if "OpenAI" in kind.__name__ else self.variables["ANTHROPIC_BASE_URL"]
        made = kind(base_url=base, api_key=self.key, max_retries=0)
        self.clients.append(made)
        return made

    @property
    def key(self) -> str:
        return self.variables["OPENAI_API_KEY"]

    @property
    def openai(self) -> str:
        return self.variables["OPENAI_BASE_URL"]

    @property
    def samples(self) -> list[Sample]:
        return self.episode.trajectory.samples

    def text(self, tokens: Sequence[int]) -> str:
        return texts(self.sampler.model)[0].decode([tokens], special_tokens=True)[0]

    def written(self, sample: Sample) -> str:
        """Return the text of a sample that is on the loss mask."""
        return self.text([token for token, mask in zip(sample.tokens, sample.mask, strict=True) if mask])


def new_episode(gateway: Gateway, sampler: Sampler, turn_tokens: int = 400, **section: Any) -> AgentEpisode:
    task = Task(7, 2, 5, 1, False, 11, [1, 2], {}, [{"role": "user", "content": TASK}], "environment")
    limits = {"max_turns": 100, "max_episode_tokens": 20_000, "max_tool_calls": 100} | section
    return AgentEpisode(
        task,
        EnvironmentSection(**limits),
        AGENT,
        lambda tools: chat(sampler.model, json.dumps(tools)),
        sampler,
        turn_tokens,
        gateway,
    )


@asynccontextmanager
async def serving(turns: Sequence[str], *, wait_s: float = 0.0, **limits: Any) -> AsyncIterator[Served]:
    gateway, sampler = Gateway(), Sampler([*turns], wait_s=wait_s)
    await gateway.start()
    try:
        episode = new_episode(gateway, sampler, **limits)
        served = Served(gateway, episode, sampler, gateway.open(episode))
        yield served
        for client in served.clients:
            await client.close()
    finally:
        await gateway.close()
