"""Environments that reply to text, in the forms of gymnasium, GEM and SkyRL-Gym."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from environment_pools import make_pool, started, written

from workers.environments.environment_pool import EnvironmentLost, EnvironmentPool, EnvironmentReply

CODE = '''
    class Base:
        def get_wrapper_attr(self, name: str) -> object:
            """Return an attribute.

            Args:
                name: Its name.
            """

    class Gymnasium(Base):
        def reset(self, *, seed=None, options=None):
            self.limit, self.turns = seed, 0
            return f"guess below {seed}", {"info": 1}

        async def step(self, action):
            self.turns += 1
            right = int(action) == 1
            return "right" if right else "wrong", float(right), right, self.turns >= self.limit, {}

        def close(self):
            print("closed")

        def render_text(self) -> str:
            """Return it as text."""

    class Old:
        def reset(self, prompt): return {"board": prompt}
        def step(self, action):
            return action if action == "text alone" else ({"board": action}, 1, action == "end", {})

    class SkyRL:
        done = False

        def init(self, prompt):
            return [*prompt, {"role": "user", "content": "begin"}], {}

        def step(self, action):
            if action == "end":
                return {"observations": [], "reward": 1.0, "done": True, "metadata": {}}
            return Output([{"role": "user", "content": action}])

    class Output:
        def __init__(self, observations):
            self.observations, self.reward, self.done = observations, 0.25, False

    class Says:
        def reset(self, said):
            self.said = said
            return said

        def step(self, action):
            return {"observations": self.said, "reward": None, "done": False}

    class Bad:
        def reset(self): pass
        def step(self, action):
            table = {"observation": "a", "reward": 1.0, "done": True}
            return {"table": table, "pair": ("a", 1), "nan": ("a", float("nan"), False, {})}.get(action) or 1 / 0
        def get_reward(self): return "high"
'''


def pool_of(folder: Path, name: str) -> EnvironmentPool:
    return make_pool(folder, path=f"{written(folder, CODE)}:{name}", processes=1)


async def episode(
    folder: Path, name: str, row: dict[str, Any], seed: int, texts: list[str]
) -> tuple[Any, list[EnvironmentReply]]:
    pool = pool_of(folder, name)
    async with started(pool) as described:
        assert (described.mode, described.tools) == ("text", ())
        environment = await pool.open()
        messages = row.get("messages", [{"role": "user", "content": "p"}])
        content = await environment.reset(row, seed, messages)
        replies = [await environment.step(text) for text in texts]
        assert await environment.reward() is None
        await environment.close()
        return content, replies


async def test_gymnasium(tmp_path: Path) -> None:
    content, replies = await episode(tmp_path, "Gymnasium", {"a": 1}, 2, ["5", "1"])
    assert content == "guess below 2"
    assert replies == [
        EnvironmentReply("wrong", 0.0, done=False),
        EnvironmentReply("right", 1.0, done=True, truncated=True),
    ]
    assert "closed" in (tmp_path / "output.log").read_text()


async def test_old_gym_whose_observations_are_no_text_and_text_alone(tmp_path: Path) -> None:
    content, replies = await episode(tmp_path, "Old", {"prompt": "p"}, 0, ["x", "text alone", "end"])
    assert content == '{"board": "p"}'
    assert replies == [
        EnvironmentReply('{"board": "x"}', 1.0, done=False),
        EnvironmentReply("text alone", None, done=False),
        EnvironmentReply('{"board": "end"}', 1.0, done=True),
    ]


@pytest.mark.parametrize("row", [{"prompt": "p"}, {"messages": [{"role": "system", "content": "s"}], "prompt": "s"}])
async def test_skyrl_gym(tmp_path: Path, row: dict[str, Any]) -> None:
    content, replies = await episode(tmp_path, "SkyRL", row, 0, ["x", "end"])
    assert content == [{"role": "user", "content": "begin"}]  # what the prompt has is not there twice
    assert replies == [
        EnvironmentReply([{"role": "user", "content": "x"}], 0.25, done=False),
        EnvironmentReply("", 1.0, done=True),
    ]


async def test_contents_of_messages_are_text(tmp_path: Path) -> None:
    """Parts of text and null are what they say, and anything else is JSON: never what Python shows."""
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    said = [{"role": "user", "content": content} for content in (parts, None, {"a": [None]}, "as it is")]
    pool = pool_of(tmp_path, "Says")
    async with started(pool):
        environment = await pool.open()
        texts = ["a b", "", '{"a": [null]}', "as it is"]
        found = await environment.reset({"said": said}, 0), (await environment.step("")).text
        assert found == ([{"role": "user", "content": text} for text in texts],) * 2


async def test_what_no_reply_can_be_made_of_loses_the_episode(tmp_path: Path) -> None:
    pool = pool_of(tmp_path, "Bad")
    async with started(pool):
        for action, text in {
            "table": "step returned observation, reward, done, not observations, reward, done",
            "pair": r"step returned 2 values, not \(observation, reward",
            "nan": r"step gave nan \(float\), not a finite number",
            "raise": "ZeroDivisionError: division by zero",
        }.items():
            environment = await pool.open()
            await environment.reset({}, 0)
            with pytest.raises(EnvironmentLost, match=text):
                await environment.step(action)
            await environment.close()
        environment = await pool.open()
        await environment.reset({}, 0)
        with pytest.raises(EnvironmentLost, match=r"get_reward gave 'high' \(str\)"):
            await environment.reward()
        await environment.close()
