"""Classes with tools, and tools without a class: what the model sees, calls and gets."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from environment_pools import make_pool, opened, started, written

from workers.environments.environment_pool import Described, EnvironmentReply

# The example of TRL's page on environments, as it stands there.
TRL_CLASS = '''
    class IncrementEnv:
        def __init__(self):
            self.counter = 0

        def reset(self, **kwargs) -> str | None:
            self.counter = 0
            return f"Increment the counter to {kwargs.get('target')}."

        def increment(self, step: int) -> int:
            """
            Increment the internal counter.

            Args:
                step: Value to add to the counter.

            Returns:
                The updated counter value.
            """
            self.counter += step
            return self.counter

        def get_reward(self) -> float:
            return float(self.counter)

        def _hidden(self):
            pass
'''
OTHER_CLASS = '''
    import decimal
    import random

    import numpy
    import torch

    class Shop:
        limit = 3

        def reset(self, item, seed):
            self.draw = [random.random(), numpy.random.rand(), torch.rand(1).item()]
            self.item, self.calls = item, []
            return [{"role": "user", "content": f"{item} {seed}"}]

        @property
        def done(self):
            return len(self.calls) >= self.limit

        @staticmethod
        def helper(anything):
            return anything

        async def buy(self, count: int = 1) -> tuple[str, float]:
            """Buy it.

            Args:
                count: How many.
            """
            self.calls.append(count)
            return f"bought {count} {self.item}", 0.5 * count

        def show(self, kind: str) -> object:
            """Show something.

            Args:
                kind: What.
            """
            values = {"draw": self.draw, "dict": {"a": [1, None], "é": {2}}, "none": None, "pair": (1, 2),
                      "keys": {(1, 2): 3}, "half": "\\ud800!", "nan": ("text", float("nan")),
                      "array": ("text", numpy.array(0.5)), "decimal": ("text", decimal.Decimal("0.5")),
                      "true": ("text", numpy.array(True))}
            return values[kind]
'''
INCREMENT = {
    "type": "function",
    "function": {
        "name": "increment",
        "description": "Increment the internal counter.",
        "parameters": {
            "type": "object",
            "properties": {"step": {"type": "integer", "description": "Value to add to the counter."}},
            "required": ["step"],
        },
    },
}


async def test_a_class_written_for_trl(tmp_path: Path) -> None:
    pool = make_pool(tmp_path, path=written(tmp_path, TRL_CLASS) + ":IncrementEnv")
    async with started(pool) as described:
        assert described == Described("tools", (INCREMENT,), gives_reward=True)
        environment = await pool.open()
        assert await environment.reset({"target": 3, "prompt": "p"}, 0) == "Increment the counter to 3."
        assert await environment.call("increment", {"step": 2}) == EnvironmentReply("2", None, done=False)
        assert await environment.call("increment", {"step": 1}) == EnvironmentReply("3", None, done=False)
        assert await environment.reward() == 3.0
        await environment.close()
        async with opened(pool) as environment:
            assert await environment.reward() == 0.0


async def test_rewards_ends_and_results_of_calls(tmp_path: Path) -> None:
    pool = make_pool(tmp_path, path=written(tmp_path, OTHER_CLASS) + ":Shop", processes=3)

    async def seeds() -> None:
        """A seed sets what the class draws, and a column of its name wins."""

        async def draw(seed: int) -> list[float]:
            async with opened(pool, {"item": "x"}, seed) as environment:
                drawn: list[float] = json.loads(str((await environment.call("show", {"kind": "draw"})).text))
                return drawn

        first, again, other = await asyncio.gather(draw(1), draw(1), draw(2))  # in three processes
        assert first == again
        assert not {*first} & {*other}
        assert first == await draw(1)  # in a process that had another episode
        environment = await pool.open()
        assert await environment.reset({"item": "x", "seed": 77}, 1) == [{"role": "user", "content": "x 77"}]
        await environment.close()

    async with started(pool) as described:
        assert [tool["function"]["name"] for tool in described.tools] == ["buy", "show"]
        assert not described.gives_reward
        environment = await pool.open()
        assert await environment.reset({"item": "tea", "other": 1}, 5) == [{"role": "user", "content": "tea 5"}]
        assert await environment.reward() is None
        assert await environment.call("buy", {"count": 2}) == EnvironmentReply("bought 2 tea", 1.0, done=False)
        for kind, text in {
            "dict": '{"a": [1, null], "é": "{2}"}',
            "none": "null",
            "pair": "[1, 2]",
            "keys": "{(1, 2): 3}",
            "half": "?!",
            "true": '["text", true]',
        }.items():
            assert await environment.call("show", {"kind": kind}) == EnvironmentReply(text, None, done=False)
        for kind in ("array", "decimal"):
            assert await environment.call("show", {"kind": kind}) == EnvironmentReply("text", 0.5, done=False)
        await environment.call("buy", {})
        assert (await environment.call("buy", {})).done
        await environment.close()
        async with opened(pool, {"item": "tea"}) as environment:
            replies = {  # what does not fit is for the model to read
                "there is no tool sell; the tools are buy, show": ("sell", {}),
                "there is no tool reset; the tools are buy, show": ("reset", {}),
                "show: missing kind and unknown x; its arguments are kind": ("show", {"x": 1}),
                "KeyError: 'nothing'": ("show", {"kind": "nothing"}),
            }
            for text, call in replies.items():
                assert await environment.call(*call) == EnvironmentReply(text, None, done=False, error=True)
        await seeds()


async def test_functions_need_no_class(tmp_path: Path) -> None:
    code = '''
        from functools import partial
        from helper import PLUS

        def add(a: float, b: float) -> float:
            """Add two numbers."""
            return a + b + PLUS

        async def now() -> str:
            """Say the time."""
            return "late"

        more = partial(add, b=1)
    '''
    written(tmp_path, "PLUS = 0.5", "helper.py")
    name = written(tmp_path, code)
    pool = make_pool(tmp_path, tools=(f"{name}:add", f"{name}:now", f"{name}:more"))
    written(tmp_path, "PLUS = 99", "helper.py")  # the code is as it was when the pool was made
    async with started(pool) as described:
        assert (described.mode, described.gives_reward) == ("tools", False)
        environment = await pool.open()
        assert await environment.reset({}, 0) is None
        assert await environment.call("add", {"a": 1, "b": 2}) == EnvironmentReply("3.5", None, done=False)
        assert await environment.call("more", {"a": 1}) == EnvironmentReply("2.5", None, done=False)
        assert await environment.call("now", {}) == EnvironmentReply("late", None, done=False)
        await environment.close()


async def test_a_parameter_of_an_enum_gets_a_member(tmp_path: Path) -> None:
    code = '''
        from __future__ import annotations
        from enum import Enum
        from functools import cache
        from typing import TYPE_CHECKING, Annotated, Dict, List

        if TYPE_CHECKING:
            from elsewhere import Thing

        class Colour(Enum):
            RED = "red"
            TWO = 2

        class Shop:
            def reset(self): pass

            def look(self, at: List = [], how: Dict = {}) -> Thing:
                """Look around."""
                return f"at {at} {how}"

            @cache
            def price(self, of: Colour) -> str:
                """Look up a price."""
                return of.name

            def mix(self, first: Colour, rest: list[Colour] | None = None, other: str | Colour = Colour.TWO,
                    named: dict[str, Annotated[Colour, "any"]] = {}):
                """Mix colours."""
                return [first.name, rest and [each.name for each in rest], str(other), str(named)]
    '''
    pool = make_pool(tmp_path, path=written(tmp_path, code) + ":Shop")
    async with started(pool), opened(pool) as environment:
        replies = {
            '["RED", null, "Colour.TWO", "{}"]': {"first": "red", "rest": None},
            '["TWO", ["RED"], "blue", "{}"]': {"first": 2, "rest": ["red"], "other": "blue"},
            '["RED", [], "Colour.RED", "{\'a\': <Colour.TWO: 2>}"]': {
                "first": "red", "rest": [], "other": "red", "named": {"a": 2},
            },
        }  # fmt: skip
        for text, arguments in replies.items():
            assert await environment.call("mix", arguments) == EnvironmentReply(text, None, done=False)
        for wrong in ({"first": "blue"}, {"first": "red", "rest": ["blue"]}):
            reply = await environment.call("mix", wrong)
            assert (reply.text, reply.error) == ("ValueError: 'blue' is not a valid Colour", True)
        assert (await environment.call("look", {"at": ["red"], "how": {"a": 1}})).text == "at ['red'] {'a': 1}"
        assert (await environment.call("price", {"of": "red"})).text == "RED"
