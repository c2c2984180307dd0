"""Try environments as the reward role runs them, each on one row: `python -m workers.offline.try_environment`.

Reads JSON from standard input: `config`, the build request of the reward role; `trials`, of each environment its
section's `key` and a `row` (null: none is at hand), or null where it is not to be tried; `max_prompt_tokens`,
`start_timeout_s`; `log`, a file for what is printed. Writes what it found of each as a line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any

from backends.hf.tokenizer import TextCodec, load_codec
from specs.errors import ModelError, RewardError
from specs.schema.environment import EnvironmentSection
from specs.text import show
from specs.wire.finding import Finding
from specs.wire.role_config import RewardConfig
from workers.chat.chat_renderer import ChatRenderer, ChatTemplateError, renderer_of
from workers.chat.chat_turns import ChatTurns, chats_by_tools
from workers.chat.tool_calls import ToolCall
from workers.environments.environment_pool import Described, EnvironmentLost, EnvironmentPool
from workers.episodes.agent_episode import AgentEpisode
from workers.episodes.episode import opening, usual_replies
from workers.episodes.episode_runner import gateway_for_agents
from workers.episodes.trajectory import Sample, SampledTurn, Task, Trajectory
from workers.grading.reward_failures import is_of_code
from workers.watchdog import die_with_parent, set_process_name

OUTPUT_LINES = 8
AGENT_S = 60.0  # for a program's own time
_ANSWER = "Yes."  # what the model is made to say to a program
_STEP = "?"  # what the model is made to say to an environment that replies to text
_GRADING = "get_reward()"
_VALUES: Mapping[str, Any] = {"integer": 1, "number": 1.0, "boolean": True, "array": [], "object": {}, "null": None}
_TEMPLATE_HINT = "repair the chat template, or use a model whose template takes these messages"
_ASKED = [{"role": "user", "content": "Hi"}]  # where no row is at hand


class EnvironmentTrial:
    """Collects what is found of one environment, in `found`."""

    def __init__(self, key: str, section: EnvironmentSection, row: Mapping[str, Any] | None, request: Any) -> None:
        """Take an environment and its row. `request`: the whole request, with its `config` parsed."""
        self.key, self.section, self.row, self.request = key, section, row, request
        self.source = next(name for name in ("path", "tools", "agent") if getattr(section, name))
        self.config: RewardConfig = request["config"]
        self.problems: list[dict[str, Any]] = []
        self._doing = "reset"
        self.found: dict[str, Any] = {"key": key, "row": row["where"] if row else "", "problems": self.problems}

    async def run(self) -> dict[str, Any]:
        """Return what was found."""
        section, log = self.section, Path(self.request["log"])
        log.write_bytes(b"")
        pool = EnvironmentPool(
            section,
            self.config.spec_dir,
            log_path=log,
            sources=self.config.sources,
            start_timeout_s=self.request["start_timeout_s"],
        )
        try:
            await self._try(pool)
        except RewardError as error:
            hint = "import it with python to see why" if str(log) in error.hint else error.hint
            self._problem(f"{self.key}.{self.source}", error.message.removeprefix(f"{section.path} "), hint)
        except (ModelError, ChatTemplateError) as error:
            self._problem("model.path", str(getattr(error, "message", error)), getattr(error, "hint", _TEMPLATE_HINT))
        finally:
            await pool.close()
        own = any(problem["key"] == f"{self.key}.{self.source}" for problem in self.problems)
        lines = log.read_text(errors="replace").splitlines()[-OUTPUT_LINES:] if own else []
        return {**self.found, "output": "\n".join(lines)}

    async def _try(self, pool: EnvironmentPool) -> None:
        described = await pool.start()
        functions = [tool["function"] for tool in described.tools]
        self.found |= {"mode": described.mode, "tools": [{"name": one["name"], **_described(one)} for one in functions]}
        call, messages, replies = None, _ASKED, [{"role": "user", "content": "1"}]
        if functions:
            call = ToolCall(functions[0]["name"], invented(functions[0]["parameters"]), "call00000")
            replies = [{"role": "tool", "name": call.name, "tool_call_id": call.id, "content": "1"}]
        if self.row is not None and self.section.command and self.config.model_path:
            await self._try_agent(pool, described, self.row)
            return
        if self.row is not None and described.mode != "agent":
            environment = await pool.open()
            try:
                messages = await opening(environment, self.row["values"], self.config.seed, self.row["messages"])
                self._doing = call.name if call else f"step({show(_STEP)})"
                answer = await (environment.call(call.name, call.arguments) if call else environment.step(_STEP))
                said = answer.text if isinstance(answer.text, list) else [{**replies[0], "content": answer.text}]
                texts = [str(one.get("content") or "") for one in said]
                replies = said if all(texts) else replies
                self.found |= {"reply": "\n".join(texts), "reply_error": answer.error}
                self._doing = _GRADING
                await environment.reward()
            except EnvironmentLost as lost:
                if call is not None and self._doing == call.name:  # who knows what the model's arguments do
                    self.found |= {"reply": str(lost), "reply_error": True, "reply_lost": True}
                else:
                    self._lost(lost)
                    if self._doing != _GRADING:
                        return
            finally:
                await environment.close(reuse=False)
        if self.config.model_path:  # else it is not at hand
            codec, renderer = _texts(self.config.model_path, self.config.trust_remote_code)
            chat = ChatTurns(codec, renderer, described.tools)
            if messages is not _ASKED:
                self._measure(messages, chat, codec, renderer)
            if self._keeps(chat, described.mode, replies):
                self._prove(chat, messages, call, str(replies[-1]["content"]))

    def _lost(self, lost: EnvironmentLost) -> None:
        """Note a call that ends the episode; it is an error where nothing but other code mends that."""
        raised, hint = str(lost).partition(":")[0], "the model may write anything: let step take any text"
        of_code = lost.cause == "crash" and (is_of_code("", str(lost)) or not raised.isidentifier())
        if lost.cause == "timeout":
            hint = f"raise {self.key}.call_timeout_s, or make it faster"
        elif not of_code:
            hint = "it may need what this machine does not have"
        elif self._doing == "reset":
            hint = f"it is given the row's columns by name: {', '.join(self.row['values'] if self.row else ())}"
        elif self._doing == _GRADING:
            hint, of_code = "return a number, however the episode went", not raised.isidentifier()
        message = f"{self._doing}, with {self.found['row']}, loses the episode: {lost}"
        self._problem(f"{self.key}.{self.source}", message, hint, refuses=of_code)

    # ── an agent that is a program ────────────────────────────────────────────────────────────────

    async def _try_agent(self, pool: EnvironmentPool, described: Described, row: Mapping[str, Any]) -> None:
        """Play an episode in which all that the sampler writes is a scripted turn."""
        codec, renderer = _texts(self.config.model_path, self.config.trust_remote_code)
        answer = codec.encode([_ANSWER], rendered=True)[0] + [codec.end_id or 0]
        prompts: list[int] = []  # their lengths

        async def draw(task: Task, number: int, sample: Sample, limit: int) -> SampledTurn:
            prompts.append(len(sample.tokens))
            return SampledTurn(answer, [0.0] * len(answer), [0] * len(answer), True)

        limits = {"max_turns": 1, "episode_timeout_s": min(self.section.episode_timeout_s, AGENT_S)}
        section, turn_tokens = self.section.model_copy(update=limits), self.config.max_response_tokens
        task = Task(0, 0, 0, 0, False, self.config.seed, [0], row["values"], row["messages"], section.name)
        chats = chats_by_tools(codec, renderer)
        gateway = gateway_for_agents()
        await gateway.start()
        try:
            episode = AgentEpisode(task, section, described, chats, draw, turn_tokens, gateway)
            ended = await episode.run(pool)
        finally:
            await gateway.close()
        self._judge_agent(prompts, episode.longest, ended, section.episode_timeout_s)
        self.found |= {"mode": "program"}
        if prompts:
            tools = sum(len(turn.request.tools) for turn in episode.tree.turns)
            wire = next((turn.request.wire for turn in episode.tree.turns), "")
            reply = f"{wire}, {tools} tools; exit code {ended.notes.get('exit_code')}"
            self.found |= {"prompt_tokens": prompts[0], "turn": _ANSWER, "reply": reply}

    def _judge_agent(self, prompts: Sequence[int], longest: int, ended: Trajectory, limit_s: float) -> None:
        key, most, turn = f"{self.key}.agent", self.section.max_episode_tokens, self.config.max_response_tokens
        of_tokens = f"{self.key}.max_episode_tokens"
        if prompts and prompts[0] + turn > most:
            message = f"the agent's first request has {prompts[0]} tokens, and a turn up to {turn}"
            self._problem(of_tokens, message, f"use at least {prompts[0] + turn}")
        elif prompts and ended.why:
            self._problem(key, f"after one turn, {ended.why}", "see what it prints", refuses=False)
        elif prompts and ended.stop == "timeout":
            message = f"did not end within {limit_s:g} s after one turn"
            self._problem(key, message, "its own time is bounded by episode_timeout_s", refuses=False)
        elif prompts:
            return
        elif ended.stop == "context_overflow":
            message = f"the agent's first request has more tokens: {longest}"
            self._problem(of_tokens, message, f"use at least {longest + turn}")
        elif ended.why:
            self._problem(key, ended.why, "run the command by hand to see why")
        else:
            message = f"did not ask the model within {limit_s:g} s"
            self._problem(key, message, "it must ask at OPENAI_BASE_URL or ANTHROPIC_BASE_URL")

    # ── the chat template ─────────────────────────────────────────────────────────────────────────

    def _measure(
        self, messages: Sequence[Mapping[str, Any]], chat: ChatTurns, codec: TextCodec, renderer: ChatRenderer
    ) -> None:
        """Count the prompt's tokens; an episode must have room for a turn behind it."""
        most, turn = self.section.max_episode_tokens, self.config.max_response_tokens

        def plain(said: Sequence[Mapping[str, Any]]) -> int:
            return len(codec.encode([renderer.render(said)], rendered=True)[0])

        prompt, of_row = len(chat.prompt(messages)), self.row["messages"] if self.row else ()
        self.found |= {"prompt_tokens": prompt, "tools_tokens": prompt - plain(messages)}
        if prompt + turn > most and plain(of_row) <= self.request["max_prompt_tokens"]:  # a longer one is dropped
            what = "prompt with the tools" if self.found["tools"] else "prompt"
            message = f"the first {what} has {prompt} tokens, and a turn up to {turn} (data.max_response_tokens)"
            self._problem(f"{self.key}.max_episode_tokens", message, f"use at least {prompt + turn}")

    def _keeps(self, chat: ChatTurns, mode: str, replies: Sequence[Mapping[str, Any]]) -> bool:
        """Return whether replies leave what stands before them as it was; what does not is an error, unless the
        conversation branches there."""
        try:
            chat.check_history([*replies, *usual_replies(mode, self.section, chat)])
        except ModelError as error:
            if self.section.history == "append":
                self._problem(f"{self.key}.history", error.message, error.hint)
            return False
        return True

    def _prove(self, chat: ChatTurns, messages: Sequence[Mapping[str, Any]], call: ToolCall | None, reply: str) -> None:
        proof = chat.prove(messages, call, reply, _STEP)
        self.found |= {"turn": proof.parsed.text.strip(), "turn_ids": proof.turn_ids, "suffix_ids": proof.suffix_ids}

    def _problem(self, key: str, message: str, hint: str, *, refuses: bool = True) -> None:
        self.problems.append(Finding(key=key, message=message, hint=hint, refuses=refuses).model_dump())


# ── tools ─────────────────────────────────────────────────────────────────────────────────────────


def _described(function: Mapping[str, Any]) -> dict[str, str]:
    """Return a tool's arguments, those with a ? may be left out, and the first line of what it says of itself."""
    parameters = function["parameters"]
    required = parameters.get("required", ())
    arguments = (f"{name}{'' if name in required else '?'}" for name in parameters["properties"])
    about = function.get("description", "").strip().partition("\n")[0]
    return {"arguments": ", ".join(arguments), "about": about}


def _types(schema: Mapping[str, Any]) -> list[str]:
    """Return the names of the types that a schema allows."""
    listed = [one.get("type", ()) for one in (schema, *schema.get("anyOf", ())) if isinstance(one, Mapping)]
    return [name for one in listed for name in ([one] if isinstance(one, str) else one)]


def invented(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments for a tool: those that it needs, or all where it needs none."""
    properties = parameters.get("properties", {})
    names = [name for name in parameters.get("required", ()) if name in properties] or list(properties)
    return {name: _invented(properties[name]) for name in names}


def _invented(schema: Mapping[str, Any]) -> Any:
    if schema.get("enum"):
        return schema["enum"][0]
    types = _types(schema)
    return "1" if not types or "string" in types else _VALUES.get(types[0], "1")


# ── the process ───────────────────────────────────────────────────────────────────────────────────


@cache
def _texts(path: str, trust_remote_code: bool) -> tuple[TextCodec, ChatRenderer]:
    """Return a model's tokenizer and its chat template."""
    codec = load_codec(path, trust_remote_code=trust_remote_code)
    return codec, renderer_of(codec)


def main() -> int:
    die_with_parent()
    set_process_name("rlctl-check")
    request = json.loads(sys.stdin.read())
    config = request["config"] = RewardConfig.model_validate(request["config"])
    replies = sys.stdout
    with redirect_stdout(sys.stderr):
        for section, asked in zip(config.environments, request["trials"], strict=True):
            if asked is not None:
                found = asyncio.run(EnvironmentTrial(asked["key"], section, asked["row"], request).run())
                print(json.dumps(found), file=replies, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
