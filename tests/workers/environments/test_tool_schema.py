"""Schemas of tools are those that transformers makes of the same functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache, partial
from typing import Any, Dict, List, Literal, Optional, Union  # noqa: UP035

import pytest

from specs.errors import RewardError
from workers.environments.tool_schema import as_hinted, schema_of


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


def plain(x: int, y: float = 2.0, z: bool = False) -> float:
    """
    Add numbers, as one does.

    More about it: nothing.

    Args:
        x: The first number,
            which goes on here
        y: The second: a float
        z: Whether to (choose one)

    Returns:
        The sum.
    """
    return x + y + z


def containers(a: list[str], b: dict[str, int], c: list, d: dict, e: list[list[float]], f: List, g: Dict):  # type: ignore[type-arg]  # noqa: UP006
    """Take them.

    Args:
        a: one
        b: two
        c: three
        d: four
        e: five
        f: six
        g: seven

    Raises:
        ValueError: never
    """


def choices(
    a: Literal["x", "y"],
    b: Colour,
    c: str | None,
    d: Optional[int],  # noqa: UP045
    e: Union[int, str],  # noqa: UP007
    f: list[int] | str | None = None,
    g: Any = None,
    h: Literal[1, "one"] = 1,
    i: tuple[int, str] | tuple = (),  # type: ignore[type-arg]
) -> None:
    """Choose.

    Args:
        a: one
        b: two
        c: three
        d: four
        e: five
        f: six
        g: seven
        h: eight
        i: nine
    """


def nothing() -> str:
    """Do nothing."""
    return ""


class WithMethod:
    def method(self, text: str) -> str:
        """Return the text.

        Args:
            text: Some text.
        """
        return text


class WithItsOwn(WithMethod):
    def method(self, text: str) -> str:
        return text[::-1]


@pytest.mark.parametrize("function", [plain, containers, choices, nothing, WithMethod.method, WithItsOwn.method])
def test_it_is_the_schema_that_transformers_makes(function: Callable[..., Any]) -> None:
    from transformers.utils import get_json_schema

    function.__annotations__.pop("return", None)  # it would stand in theirs, and few templates and no server show it
    assert schema_of(function) == get_json_schema(function)


def test_it_knows_more_forms_of_docstrings_and_signatures() -> None:
    def tool(x: int, *rest: int, y: str = "", **more: Any) -> None:
        """Do it.

        Arguments:
            x (int): The number
        """

    assert schema_of(tool, "other") == {
        "type": "function",
        "function": {
            "name": "other",
            "description": "Do it.",
            "parameters": {
                "type": "object",
                "properties": {"x": {"type": "integer", "description": "The number"}, "y": {"type": "string"}},
                "required": ["x"],
            },
        },
    }


def test_a_parameter_of_a_tuple_gets_one() -> None:
    def tool(a: tuple[int, Colour], b: tuple[Colour, ...] = (), c: tuple = ()) -> None:  # type: ignore[type-arg]
        """Take them."""

    names = {"type": "string", "enum": ["red", "blue"]}
    pair = {"type": "array", "prefixItems": [{"type": "integer"}, names]}
    properties = {"a": pair, "b": {"type": "array", "items": names}, "c": {"type": "array"}}
    assert schema_of(tool)["function"]["parameters"]["properties"] == properties
    given = as_hinted(tool, {"a": [1, "red", 2], "b": ["blue"] * 3, "c": [4]})
    assert given == {"a": (1, Colour.RED, 2), "b": (Colour.BLUE,) * 3, "c": (4,)}


def test_what_follows_the_arguments_without_indent_is_no_part_of_them() -> None:
    def tool(x: int, y: str) -> None:
        """Do it.

        Args:
            x: The number,
                and more

            y: The text

        Returns: nothing, as one
        line: says

        Args are over.
        """

    properties = schema_of(tool)["function"]["parameters"]["properties"]
    assert {name: each["description"] for name, each in properties.items()} == {
        "x": "The number, and more",
        "y": "The text",
    }


@dataclass
class Search:
    index: dict[str, Any]

    def __call__(self, query: str, most: int = 3) -> list[str]:
        """Search the index.

        Args:
            query: What for
        """
        return [self.index[query]][:most]


def test_objects_that_are_called_and_partials_are_tools() -> None:
    table = schema_of(Search({}), "search")
    assert table["function"] == {
        "name": "search",
        "description": "Search the index.",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string", "description": "What for"}, "most": {"type": "integer"}},
            "required": ["query"],
        },
    }
    parameters = table["function"]["parameters"]
    assert schema_of(lru_cache(Search({}).__call__), "search") == table
    assert schema_of(partial(Search.__call__, Search({})), "search") == table
    filled = partial(Search({}), most=1)
    filled.__doc__ = "Find one."
    description = {"name": "one", "description": "Find one."}
    inner = {**parameters, "properties": {"query": {"type": "string"}}}
    assert schema_of(filled, "one")["function"] == {**description, "parameters": inner}


def test_a_hint_that_cannot_be_found_is_its_own_parameters() -> None:
    """What a function returns may be known to type checkers alone."""

    def tool(x: int, y: Nowhere = 0) -> Elsewhere:  # type: ignore[name-defined]  # noqa: F821
        """Do it."""

    with pytest.raises(RewardError, match="tool tool: the type hint of y: name 'Nowhere' is not defined"):
        schema_of(tool)
    tool.__annotations__["y"] = str
    assert [*schema_of(tool)["function"]["parameters"]["properties"]] == ["x", "y"]


@pytest.mark.parametrize("hint", [tuple[int], set[str], bytes, Literal[b"x"], WithMethod, Callable, bytes | None])
def test_a_type_that_json_does_not_know(hint: Any) -> None:
    def tool(x: Any) -> None:
        """Do it."""

    tool.__annotations__["x"] = hint
    with pytest.raises(RewardError, match="tool tool: the type hint of x: ") as caught:
        schema_of(tool)
    assert "str, int, float" in caught.value.hint
