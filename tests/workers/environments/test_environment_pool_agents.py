"""Agents: a user's own loop against the sampler, over the same pipe."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from environment_pools import make_pool, started, written

from specs.errors import RewardError
from workers.environments.environment_pool import EnvironmentLost, EnvironmentPool
from workers.episodes.episode import Ended

CODE = """
    import asyncio

    async def impatient(task, client):
        asyncio.ensure_future(client.chat([]))
        await asyncio.sleep(0)
        return {}

    async def gives_up(task, client):
        await client.chat([])

    async def copes_once(task, client):
        try:
            await client.chat([])
        except RuntimeError:
            await asyncio.sleep(0)
        await client.chat([])

    async def bypasses(task, client):
        from urllib.request import proxy_bypass
        return {host: proxy_bypass(host) for host in ("127.0.0.1", "a.here", "elsewhere")}

    class Agent:
        async def __call__(self, task, client):
            return {}

    agent = Agent()

    async def lies(task, client):
        return "1.0"
"""


def agent_pool(folder: Path, name: str) -> EnvironmentPool:
    return make_pool(folder, agent=f"{written(folder, CODE)}:{name}", processes=1)


async def answers(_: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"role": "assistant", "content": ""}


async def test_an_object_is_an_agent_too(tmp_path: Path) -> None:
    pool = agent_pool(tmp_path, "agent")
    async with started(pool):
        environment = await pool.open()
        assert await environment.run_agent({}, answers) == {"reward": None, "metrics": {}}
        await environment.close()
    with pytest.raises(RewardError, match="Agent is not async"):
        await agent_pool(tmp_path, "Agent").start()


async def test_no_proxy_stands_before_the_gateway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", ".here")
    pool = agent_pool(tmp_path, "bypasses")
    async with started(pool):
        for _ in range(2):
            environment = await pool.open()
            metrics = (await environment.run_agent({}, answers))["metrics"]
            assert metrics == {"127.0.0.1": 1.0, "a.here": 1.0, "elsewhere": 0.0}
            await environment.close()


async def test_an_agent_that_gives_what_is_no_reward(tmp_path: Path) -> None:
    pool = agent_pool(tmp_path, "lies")
    async with started(pool):
        environment = await pool.open()
        with pytest.raises(EnvironmentLost, match=r"the agent gave '1.0' \(str\), not a finite number"):
            await environment.run_agent({}, answers)
        await environment.close()


async def test_the_refusal_that_ends_an_agent_is_told_not_one_that_it_coped_with(tmp_path: Path) -> None:
    pool = agent_pool(tmp_path, "copes_once")
    refusals: list[Exception] = [EnvironmentLost("crash", "no list"), Ended("max_turns")]

    async def refuses(_: Mapping[str, Any]) -> Mapping[str, Any]:
        raise refusals.pop(0)

    async with started(pool):
        environment = await pool.open()
        with pytest.raises(Ended, match="max_turns"):
            await environment.run_agent({}, refuses)
        await environment.close()


async def test_answers_that_nobody_waits_for_do_not_disturb_the_next_episode(tmp_path: Path) -> None:
    pool = agent_pool(tmp_path, "impatient")
    async with started(pool):
        for _ in range(3):
            environment = await pool.open()
            assert await environment.run_agent({}, answers) == {"reward": None, "metrics": {}}
            await environment.close()


async def test_a_cancelled_agent_and_its_requests_end(tmp_path: Path) -> None:
    pool = agent_pool(tmp_path, "gives_up")
    ends: list[str] = []
    async with started(pool):
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
