"""Agents that people have, as they are: each calls a tool and answers, and what the sampler drew is what is learned.

Their turns are scripted, but go through parser, tree and masks. A harness that is not on the PATH is skipped.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from agent_clients import CLIENTS, HARNESSES
from agent_gateway import END, TASK, Sampler, Served, new_episode

from workers.chat.tool_calls import ToolCall
from workers.episodes.trajectory import Sample, SampledTurn, Task
from workers.gateway.chat_request import ChatReply
from workers.gateway.gateway_server import WIRES, Gateway
from workers.gateway.turn_tree import TurnTree

ANSWER, FOUND = "The answer is forty-two.", "found-it-42"
SHELLS = ("bash", "shell", "run_shell_command", "exec_command")


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
async def test_a_harness_learns_from_what_was_sampled(tmp_path: Path, name: str) -> None:
    client = CLIENTS[name]
    if client.missing():
        pytest.skip(f"{client.needs} is neither on the PATH nor can be imported")
    home, cwd = tmp_path / "home", tmp_path / "cwd"
    home.mkdir()
    cwd.mkdir()
    gateway, sampler = Gateway(), Scripted([""], submit=client.submit)
    await gateway.start()
    try:
        episode = new_episode(gateway, sampler, max_episode_tokens=400_000)
        sampler.episode = episode
        served = Served(gateway, episode, sampler, gateway.open(episode))
        more = client.setup(home, served.openai, served.key)
        env = {"PATH": os.environ["PATH"], "HOME": str(home), "LANG": "C.UTF-8", **served.variables, **more}
        process = await asyncio.create_subprocess_exec(
            *client.started_on(TASK), cwd=cwd, env=env, start_new_session=True,
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
        assert {turn.request.wire for turn in learned} == {client.wire}
        # One sample, whose ids are the sampler's own, turn by turn.
        (number,) = {turn.sample for turn in learned}
        sample = served.samples[number]
        drawn = [tokens for turn in learned for prompt, tokens in sampler.log if len(prompt) == turn.start]
        assert [sample.tokens[turn.start : turn.end] for turn in learned] == drawn
        assert served.written(sample) == "".join(served.text(tokens) for tokens in drawn)
        told = [str(message["content"]) for message in learned[1].request.messages if message["role"] == "tool"]
        assert any(FOUND in text for text in told), told
        assert (client.submit or ANSWER) in served.text(drawn[-1])
    finally:
        await gateway.close()


# What each sends, with other texts in it and few of its tools: a call and its result; of opencode a title before.
REQUESTS = Path(__file__).parent / "requests"


@pytest.mark.parametrize("name", sorted(path.stem for path in REQUESTS.iterdir()))
async def test_what_a_harness_sends_goes_on_from_what_was_sampled(name: str) -> None:
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
        reply = ChatReply(turn.id, "" if calls else ANSWER, "hm", calls)
        turn.reply.set_result(reply)
        tree.drawn(turn, reply)
        turn.delivered = True
    *before, first, second = turns
    assert second.parent is first, "its arguments may be written otherwise, its cache marks may have moved"
    assert [message["role"] for message in second.added] == ["tool"]
    assert FOUND in second.added[0]["content"]
    assert tree.main_roots(TASK) == [first], "not what was written beside the task"
    assert len(before) == (name == "opencode")
