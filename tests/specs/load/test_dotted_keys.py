"""Nested tables by dotted keys."""

from __future__ import annotations

from typing import Any

from specs.load.dotted_keys import differing_keys, flattened, value_at

TREE: dict[str, Any] = {"a": {"b": 1, "c": [{"d": 2}, {"d": None}], "e": {}}, "f": [3, 4]}


def test_differing_keys() -> None:
    assert differing_keys({"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"b": 1, "c": 5}, "d": 3, "e": 1}) == ["a.c", "e"]


def test_flattened() -> None:
    assert flattened(TREE) == {"a.b": 1, "a.c.0.d": 2, "a.c.1.d": None, "a.e": {}, "f": [3, 4]}


def test_value_at() -> None:
    assert value_at(TREE, "") == TREE
    assert value_at(TREE, "a.b") == 1
    assert value_at(TREE, ("a", "c", 1, "d"), missing="?") is None
    for key in ("a.x", "a.b.x", "f.x", ("f", 2)):
        assert value_at(TREE, key, missing="?") == "?"
