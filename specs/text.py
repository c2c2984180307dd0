"""Values and lists of numbers, as they stand in what a person reads."""

from __future__ import annotations

from typing import Any

_ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t", "\r": "\\r"}


def show(value: Any, limit: int = 60) -> str:
    """A value as TOML would write it, cut to `limit` characters; "" for tables."""
    if isinstance(value, dict) or value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        text = '"' + "".join(_shown(character) for character in value) + '"'
    elif isinstance(value, list | tuple):
        text = "[" + ", ".join(show(item) or "{…}" for item in value) + "]"
    else:
        text = str(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def show_default(value: Any) -> str:
    """A key's default as TOML writes it, or "" for tables and None."""
    return show(value) if isinstance(value, bool | int | float | str | tuple) and value not in ("", ()) else ""


def listed(numbers: list[int], shown: int = 8) -> str:
    """`1, 2 or 4`; of more than `shown`, the largest."""
    *others, last = map(str, numbers[-shown:])
    return f"{', '.join(others)} or {last}" if others else last


def _shown(character: str) -> str:
    """A character as TOML writes it between double quotes; unprintable ones by their number."""
    if character in _ESCAPES:
        return _ESCAPES[character]
    return character if character.isprintable() else f"\\u{ord(character):04x}"
