"""What cannot be an environment is refused, with what to do."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from environment_pools import make_pool, written

from specs.errors import RewardError
from workers.environments.loaded import load

CODE = '''
    import asyncio

    class NoReset:
        def buy(self, item: str):
            """Buy."""

    class NoTools:
        def reset(self): pass
        @staticmethod
        def helper(x): pass

    class NoHint:
        def reset(self): pass
        def buy(self, item):
            """Buy."""

    class NoDocstring:
        def reset(self): pass
        def buy(self, item: str): pass

    class NoSuchType:
        def reset(self): pass
        def buy(self, item: "Item"):
            """Buy."""

    class Unknown:
        def reset(self): pass
        def buy(self, item: asyncio.Future):
            """Buy."""

    class Yields:
        def reset(self): pass
        async def buy(self, item: str):
            """Buy."""
            yield item

    class ByPlace:
        def reset(self): pass
        def buy(self, item: str, /, count: int = 1):
            """Buy."""

    class Needs:
        def __init__(self, size): pass
        def reset(self): pass
        def buy(self, item: str):
            """Buy."""

    class Both:
        def reset(self): pass
        def step(self, text): return text
        def buy(self, item: str):
            """Buy.

            Args:
                item: What to buy.
            """

    class Text:
        def reset(self): pass
        def step(self, text): return text
        def render_board(self, wide: bool = False) -> str:
            """Return the board as text."""

    class NoStart:
        def step(self, text): return text

    class Shop:
        def reset(self): pass
        def buy(self, item: str):
            """Buy."""

    class Table(dict):
        def reset(self): pass
        def look(self, item: str):
            """Look."""

    class Meta(type):
        def __dir__(self): raise LookupError("nothing here")

    class Odd(metaclass=Meta):
        def reset(self): pass

    def buy(item: str):
        """Buy."""

    def run(task, client):
        return 0.0

    number = 3
'''
REFUSED = {
    "NoReset": "users.py:NoReset has no reset",
    "NoStart": "users.py:NoStart has no reset",
    "NoTools": "users.py:NoTools has no tools",
    "NoHint": "tool buy: item has no type hint",
    "NoDocstring": "tool buy has no docstring",
    "NoSuchType": "tool buy: the type hint of item: name 'Item' is not defined",
    "Unknown": "tool buy: the type hint of item: <class '_asyncio.Future'> is no JSON type",
    "Yields": "tool buy yields: a call gives a generator",
    "ByPlace": "tool buy: item is positional-only",
    "Needs": "users.py:Needs: its constructor has a missing a required argument: 'size'",
    "Both": "users.py:Both replies to text, with step, and has a tool, buy: both at once",
    "Nowhere": "users.py defines no Nowhere",
    "buy": "users.py:buy is a function, not a class",
    "number": "users.py:number is a int, not a class",
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_class_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(RewardError) as caught:
        load(f"{written(tmp_path, CODE)}:{name}", (), "", str(tmp_path))
    assert caught.value.message == REFUSED[name]
    assert caught.value.hint


@pytest.mark.parametrize(
    ("path", "tools", "agent", "text"),
    [
        ("users.py:Shop", ("users.py:buy",), "", "two tools are called buy: of users.py:Shop and users.py:buy"),
        ("users.py:Text", ("users.py:buy",), "", "users.py:Text replies to text, and there are tools"),
        ("", ("users.py:Shop",), "", "users.py:Shop is no function"),
        ("", ("users.py:number",), "", "users.py:number is no function"),
        ("", (), "users.py:run", "users.py:run is not async"),
        ("", (), "users.py:Shop", "users.py:Shop is not async"),
    ],
)
def test_tools_and_agents_are_refused(tmp_path: Path, path: str, tools: tuple[str, ...], agent: str, text: str) -> None:
    written(tmp_path, CODE)
    with pytest.raises(RewardError) as caught:
        load(path, tools, agent, str(tmp_path))
    assert caught.value.message == text
    assert caught.value.hint


def test_helpers_of_a_text_environment_are_no_tools(tmp_path: Path) -> None:
    assert load(f"{written(tmp_path, CODE)}:Text", (), "", str(tmp_path)).mode == "text"


def test_a_class_whose_constructor_has_no_signature(tmp_path: Path) -> None:
    assert [*load(f"{written(tmp_path, CODE)}:Table", (), "", str(tmp_path)).tools] == ["look"]


def test_what_nobody_foresaw_of_a_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(RewardError, match="LookupError: nothing here"):
        asyncio.run(make_pool(tmp_path, path=written(tmp_path, CODE) + ":Odd").start())


def test_start_raises_what_loading_raised(tmp_path: Path) -> None:
    with pytest.raises(RewardError) as caught:
        asyncio.run(make_pool(tmp_path, path=written(tmp_path, CODE) + ":NoHint").start())
    assert (caught.value.message, caught.value.hint) == (REFUSED["NoHint"], "write item: str, or another type")
    with pytest.raises(RewardError, match=r"environment file .*nowhere\.py does not exist"):
        load("nowhere.py:Shop", (), "", str(tmp_path))
    with pytest.raises(RewardError, match=r"wrong\.py:3: NameError: name 'nothing' is not defined"):
        load(written(tmp_path, "\n\nnothing", "wrong.py") + ":Shop", (), "", str(tmp_path))
