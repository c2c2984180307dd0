"""Nested tables by dotted keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def value_at(values: Any, key: str | Sequence[str | int], missing: Any = None) -> Any:
    """Return the value at a dotted key, or at a path of names and places in lists; `missing` where there is none."""
    for part in (key.split(".") if key else ()) if isinstance(key, str) else key:
        try:
            values = values[part]
        except (KeyError, IndexError, TypeError):
            return missing
    return values


def flattened(values: Any, prefix: str = "") -> dict[str, Any]:
    """Return dotted key → value. Tables in a list stand under their number; an empty table is a value."""
    if isinstance(values, list) and any(isinstance(one, Mapping) for one in values):
        values = {str(number): one for number, one in enumerate(values)}
    if not isinstance(values, Mapping) or not values:
        return {prefix: values}
    parts = (flattened(inner, f"{prefix}.{name}" if prefix else name) for name, inner in values.items())
    return {key: value for part in parts for key, value in part.items()}


def differing_keys(before: Any, after: Any, prefix: str = "") -> list[str]:
    """Return the dotted keys whose values differ, sorted; lists are compared whole."""
    if isinstance(before, dict) and isinstance(after, dict):
        keys = sorted(before.keys() | after.keys())
        return [
            found
            for key in keys
            for found in differing_keys(before.get(key), after.get(key), f"{prefix}.{key}" if prefix else key)
        ]
    return [] if before == after else [prefix]
