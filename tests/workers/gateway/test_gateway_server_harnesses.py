"""Agents that people have, as they are: each calls a tool and answers, and what the sampler drew is what is learned.

Their turns are scripted, but go through parser, tree and masks. A harness that is not on the PATH is skipped.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from agent_gateway import END, TASK, Sampler, Served, new_episode

from workers.chat.tool_calls import ToolCall
from workers.environments.harness import MODEL_NAME
from workers.episodes.trajectory import Sample, SampledTurn, Task
from workers.episodes.turn_tree import TurnTree
from workers.gateway.chat_request import ChatReply
from workers.gateway.gateway_server import WIRES, Gateway

SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
ANSWER, FOUND = "The answer is forty-two.", "found-it-42"
SHELLS = ("bash", "shell", "run_shell_command", "exec_command")
Setup = Callable[[Path, str, str], Mapping[str, str]]


@dataclass(frozen=True)
class Harness:
    """How one is started on a task. `setup` writes what it reads in its home, and returns variables. `submit`: the
    command that ends one which takes no answer without a call."""

    command: tuple[str, ...]
    setup: Setup = lambda home, base, key: {}
    wire: str = "chat"
    submit: str = ""


def _codex(home: Path, base: str, key: str) -> Mapping[str, str]:
    (home / ".codex").mkdir()
    (home / ".codex" / "config.toml").write_text(
        f'model = "{MODEL_NAME}"\nmodel_provider = "own"\n'
        '[model_providers.own]\nname = "own"\nenv_key = "OPENAI_API_KEY"\nwire_api = "responses"\n'
        f'base_url = "{base}"\n'
    )
    return {}


def _opencode(home: Path, base: str, key: str) -> Mapping[str, str]:
    options = {"baseURL": base, "apiKey": key}
    models = {MODEL_NAME: {"name": MODEL_NAME, "limit": {"context": 200000, "output": 4096}}}
    provider = {"own": {"npm": "@ai-sdk/openai-compatible", "options": options, "models": models}}
    config = {"provider": provider, "model": f"own/{MODEL_NAME}", "autoupdate": False, "permission": {"*": "allow"}}
    return {"OPENCODE_CONFIG_CONTENT": json.dumps(config), "OPENCODE_DISABLE_MODELS_FETCH": "1"}


def _pi(home: Path, base: str, key: str) -> Mapping[str, str]:
    folder = home / ".pi" / "agent"
    folder.mkdir(parents=True)
    model = {"id": MODEL_NAME, "contextWindow": 200000, "maxTokens": 4096}
    own = {"baseUrl": base, "api": "openai-completions", "apiKey": key, "models": [model]}
    (folder / "models.json").write_text(json.dumps({"providers": {"own": own}}))
    return {"PI_OFFLINE": "1"}


def _mini(home: Path, base: str, key: str) -> Mapping[str, str]:
    cost = {"MSWEA_COST_TRACKING": "ignore_errors", "MSWEA_CONFIGURED": "true", "MSWEA_SILENT_STARTUP": "1"}
    return {"OPENAI_API_BASE": base, **cost}


HARNESSES: Mapping[str, Harness] = {
    "claude": Harness(
        ("claude", "-p", TASK, "--allowedTools", "Bash"),
        lambda *_: {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1"},
        "messages",
    ),
    "codex": Harness(
        ("codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", TASK),
        _codex,
        "responses",
    ),
    "qwen": Harness(("qwen", "-p", TASK, "--yolo", "--auth-type", "openai"), lambda *_: {"OPENAI_MODEL": MODEL_NAME}),
    "opencode": Harness(("opencode", "run", TASK), _opencode),
    "pi": Harness(("pi", "-p", "--provider", "own", "--model", MODEL_NAME, TASK), _pi),
    "mini": Harness(
        ("mini", "-t", TASK, "-m", f"openai/{MODEL_NAME}", "--yolo", "--exit-immediately"), _mini, submit=SUBMIT
    ),
}


@dataclass
class Scripted(Sampler):
    """Calls the shell that a request brings, then answers; a request without one gets the answer at once. Arguments are
    written with spaces that no harness would write."""

    submit: str = ""
    episode: Any = None

    async def __call__(self, task: Task, number: int, sample: Sample, limit: int) -> SampledTurn:
        request = self.episode.tree.turns[-1].request
        shells = [tool["function"] for tool in request.tools if tool["function"]["name"].lower() in SHELLS]
        told = any(message["role"] == "tool" for message in request.messages)
        command = self.submit if told else f"echo {FOUND}"
        self.turns = [f"{call_of(shells[0], command) if shells and command else ANSWER}{END}"]
        return await super().__call__(task, number, sample, limit)


def call_of(function: Mapping[str, Any], command: str) -> str:
    """A call of a shell; what else it requires gets some value."""
    properties, arguments = function["parameters"]["properties"], {}
    for name in {*function["parameters"].get("required", ()), "command", "cmd"} & {*properties}:
        values = {"string": command, "boolean": False, "array": command.split()}
        arguments[name] = values.get(properties[name].get("type"), 1000)
    return f'<tool_call>\n{{"name":  "{function["name"]}", "arguments":  {json.dumps(arguments)}}}\n</tool_call>'


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", HARNESSES)
def test_a_harness_learns_from_what_was_sampled(tmp_path: Path, name: str) -> None:
    harness = HARNESSES[name]
    if shutil.which(harness.command[0]) is None:
        pytest.skip(f"{harness.command[0]} is not on the PATH")
    asyncio.run(_try(tmp_path, harness))


async def _try(folder: Path, harness: Harness) -> None:
    home, cwd = folder / "home", folder / "cwd"
    home.mkdir()
    cwd.mkdir()
    gateway, sampler = Gateway(), Scripted([""], submit=harness.submit)
    await gateway.start()
    try:
        episode = new_episode(gateway, sampler, max_episode_tokens=400_000)
        sampler.episode = episode
        served = Served(gateway, episode, sampler, gateway.open(episode))
        more = harness.setup(home, served.openai, served.key)
        env = {"PATH": os.environ["PATH"], "HOME": str(home), "LANG": "C.UTF-8", **served.variables, **more}
        process = await asyncio.create_subprocess_exec(
            *harness.command, cwd=cwd, env=env, start_new_session=True,
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        try:
            said = (await asyncio.wait_for(process.communicate(), 120))[0].decode()
        finally:
            if process.returncode is None:
                os.killpg(process.pid, 9)
        episode.settle()
        turns = episode.tree.turns
        assert turns, f"it never asked: {said[-2000:]} {episode._refused}"
        about = json.dumps([(turn.request.wire, turn.sample, turn.learned, turn.delivered) for turn in turns])
        learned = [turn for turn in turns if turn.learned]
        assert len(learned) >= 2, f"{about}\n{said[-3000:]}\n{episode._refused}"
        assert {turn.request.wire for turn in learned} == {harness.wire}
        # One sample, whose ids are the sampler's own, turn by turn.
        (number,) = {turn.sample for turn in learned}
        sample = served.samples[number]
        drawn = [tokens for turn in learned for prompt, tokens in sampler.log if len(prompt) == turn.start]
        assert [sample.tokens[turn.start : turn.end] for turn in learned] == drawn
        assert served.written(sample) == "".join(served.text(tokens) for tokens in drawn)
        told = [str(message["content"]) for message in learned[1].request.messages if message["role"] == "tool"]
        assert any(FOUND in text for text in told), told
        assert (harness.submit or ANSWER) in served.text(drawn[-1])
    finally:
        await gateway.close()


# What each sends, with other texts in it and few of its tools: a call and its result; of opencode a title before.
REQUESTS = Path(__file__).parent / "requests"


@pytest.mark.parametrize("name", HARNESSES)
def test_what_a_harness_sends_goes_on_from_what_was_sampled(name: str) -> None:
    asyncio.run(_replay(name))


async def _replay(name: str) -> None:
    tree = TurnTree("replay")
    lines = [json.loads(line) for line in (REQUESTS / f"{name}.jsonl").read_text().splitlines()]
    asked = [WIRES[line["path"]].read(line["body"]) for line in lines]
    assert {line["path"] for line in lines} <= set(WIRES)
    turns = []
    for request in asked:
        turn, new = tree.find(request)
        assert new
        turns.append(turn)
        shells = [tool["function"] for tool in request.tools if tool["function"]["name"].lower() in SHELLS]
        calls = ()
        if shells and turn.parent is None:
            script = json.loads(call_of(shells[0], f"echo {FOUND}").split("\n")[1])
            calls = (ToolCall(script["name"], script["arguments"], "call00000"),)
        reply = ChatReply(turn.id, "" if calls else ANSWER, calls=calls)
        turn.reply.set_result(reply)
        tree.drawn(turn, reply)
        turn.delivered = True
    *before, first, second = turns
    assert second.parent is first, "its arguments may be written otherwise, its cache marks may have moved"
    assert [message["role"] for message in second.added] == ["tool"]
    assert FOUND in second.added[0]["content"]
    assert tree.main_roots(TASK) == [first], "not what was written beside the task"
    assert len(before) == (name == "opencode")
