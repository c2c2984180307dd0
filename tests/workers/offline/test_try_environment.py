"""Arguments that are invented for a tool: of its schema's types, so that what reads them back can be compared."""

from __future__ import annotations

from typing import Any

import pytest

from workers.offline.try_environment import invented


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"type": "string"}, "1"),
        ({"type": "integer"}, 1),
        ({"type": "number", "nullable": True}, 1.0),
        ({"type": "boolean"}, True),
        ({"type": "array", "items": {"type": "string"}}, []),
        ({"type": "object"}, {}),
        ({"type": ["integer", "string"]}, "1"),  # some forms write both alike: text is read
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, 1),
        ({"type": "string", "enum": ["fast", "slow"]}, "fast"),
        ({"$ref": "#/$defs/Thing"}, "1"),
        ({}, "1"),
    ],
)
def test_values_are_of_the_type(schema: dict[str, Any], value: Any) -> None:
    assert invented({"properties": {"a": schema}, "required": ["a"]}) == {"a": value}


def test_what_may_be_left_out_is_unless_nothing_is_needed() -> None:
    properties = {"a": {"type": "string"}, "b": {"type": "integer"}}
    assert invented({"properties": properties, "required": ["b"]}) == {"b": 1}
    assert invented({"properties": properties}) == {"a": "1", "b": 1}
    assert invented({}) == {}
