"""Agents: a user's own loop against the sampler, over the same pipe."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from environment_pools import make_pool, run, written

from workers.environments.environment_pool import Described, EnvironmentLost, EnvironmentPool

CODE = """
    import asyncio, random, time

    async def two_turns(task, client):
        messages = list(task["messages"])
        for _ in range(2):
            reply = await client.chat(messages, max_tokens=5)
            messages += [reply, {"role": "user", "content": "go on"}]
        print(messages)
        return {"reward": len(messages), "length": len(reply["content"]), "metrics": {"more": 2}, "note": "no number"}

    async def at_once(task, client):
        replies = await asyncio.gather(*(client.chat([{"role": "user", "content": str(n)}]) for n in range(4)))
        return float("".join(reply["content"] for reply in replies))

    async def impatient(task, client):
        asyncio.ensure_future(client.chat([]))
        await asyncio.sleep(0)
        return {}

    async def gives_up(task, client):
        await client.chat([])

    async def goes_on(task, client):
        try:
            await client.chat([])
        except RuntimeError as error:
            return {"reward": 0.5, "metrics": {"length": len(str(error))}}

    async def raises(task, client):
        raise KeyError("task")

    async def lies(task, client):
        return "1.0"

    async def sleeps(task, client):
        time.sleep(600)
"""


def agent_pool(folder: Path, name: str) -> EnvironmentPool:
    return make_pool(folder, agent=f"{written(folder, CODE)}:{name}", processes=1)


class LimitReached(Exception):
    pass


async def no_more(_: Mapping[str, Any]) -> Mapping[str, Any]:
    raise LimitReached("max_turns")


def outcome(folder: Path, name: str, chat: Any = no_more, task: dict[str, Any] | None = None) -> dict[str, Any]:
    pool = agent_pool(folder, name)

    async def test(_: Described) -> dict[str, Any]:
        environment = await pool.open()
        try:
            return await environment.run_agent(task or {}, chat)
        finally:
            await environment.close()

    return run(pool, test)


def test_a_conversation_of_two_turns(tmp_path: Path) -> None:
    requests: list[Mapping[str, Any]] = []

    async def chat(request: Mapping[str, Any]) -> Mapping[str, Any]:
        requests.append(request)
        await asyncio.sleep(0.01)
        return {"role": "assistant", "content": "x" * len(requests), "tool_calls": []}

    task = {"messages": [{"role": "user", "content": "q"}]}
    found = outcome(tmp_path, "two_turns", chat, task)
    assert found == {"reward": 5.0, "metrics": {"length": 2.0, "more": 2.0}}
    assert [request["max_tokens"] for request in requests] == [5, 5]
    assert requests[0]["messages"] == task["messages"]
    assert [message["content"] for message in requests[1]["messages"]] == ["q", "x", "go on"]


def test_requests_at_once_get_their_own_answers(tmp_path: Path) -> None:
    async def chat(request: Mapping[str, Any]) -> Mapping[str, Any]:
        number = int(request["messages"][0]["content"])
        await asyncio.sleep(0.02 * (4 - number))
        return {"role": "assistant", "content": str(number + 1)}

    assert outcome(tmp_path, "at_once", chat) == {"reward": 1234.0, "metrics": {}}


def test_a_limit_is_raised_to_the_caller_unless_the_agent_goes_on(tmp_path: Path) -> None:
    with pytest.raises(LimitReached, match="max_turns"):
        outcome(tmp_path, "gives_up")
    found = outcome(tmp_path, "goes_on")
    assert found == {"reward": 0.5, "metrics": {"length": float(len("LimitReached: max_turns"))}}


@pytest.mark.parametrize(
    ("name", "text"), [("raises", "KeyError: 'task'"), ("lies", r"the agent gave '1.0' \(str\), not a finite number")]
)
def test_an_agent_that_fails(tmp_path: Path, name: str, text: str) -> None:
    with pytest.raises(EnvironmentLost, match=text):
        outcome(tmp_path, name)


def test_answers_that_nobody_waits_for_do_not_disturb_the_next_episode(tmp_path: Path) -> None:
    pool = agent_pool(tmp_path, "impatient")

    async def chat(_: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"role": "assistant", "content": ""}

    async def test(_: Described) -> None:
        for _ in range(3):
            environment = await pool.open()
            assert await environment.run_agent({}, chat) == {"reward": None, "metrics": {}}
            await environment.close()

    run(pool, test)


def test_a_cancelled_agent_and_its_requests_end(tmp_path: Path) -> None:
    pool = agent_pool(tmp_path, "gives_up")
    ends: list[str] = []

    async def test(_: Described) -> None:
        for _ in range(2):
            environment = await pool.open()
            asked = asyncio.Event()

            async def chat(_: Mapping[str, Any], asked: asyncio.Event = asked) -> Mapping[str, Any]:
                asked.set()
                try:
                    await asyncio.sleep(600)
                finally:
                    ends.append("ended")
                return {}

            running = asyncio.create_task(environment.run_agent({}, chat))
            await asked.wait()
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            await environment.close()
        assert ends == ["ended", "ended"]

    run(pool, test)


def test_an_agent_that_blocks_is_killed_when_its_episode_is_cancelled(tmp_path: Path) -> None:
    pool = agent_pool(tmp_path, "sleeps")

    async def test(_: Described) -> None:
        environment = await pool.open()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await environment.run_agent({}, no_more)
        await environment.close()
        await (await pool.open()).close()

    run(pool, test)
