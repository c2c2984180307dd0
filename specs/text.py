"""Write values and lists of numbers for a person to read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

# How a file begins that Git LFS has not fetched, and what is said of it.
LFS, NOT_FETCHED, LFS_FETCH = "version https://git-lfs", "a pointer of Git LFS, not the file itself", "git lfs pull"
LFS_POINTER = f"is {NOT_FETCHED}: `{LFS_FETCH}` fetches it"
_HALF = "half of a surrogate pair, which is not text"
_ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t", "\r": "\\r"}


def show(value: Any, limit: int = 60) -> str:
    """Return a value as TOML writes it, at most `limit` characters; "" for tables."""
    if isinstance(value, dict) or value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        text = '"' + "".join(_shown(character) for character in value) + '"'
    elif isinstance(value, list | tuple):
        text = "[" + ", ".join(show(item) or "{…}" for item in value) + "]"
    elif fields := getattr(value, "model_fields_set", None):  # a table of a default
        text = "{ " + ", ".join(f"{name} = {show(getattr(value, name))}" for name in sorted(fields)) + " }"
    else:
        text = str(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def show_default(value: Any) -> str:
    """Return a key's default as TOML writes it, or "" for tables and None."""
    return show(value) if isinstance(value, bool | int | float | str | tuple) and value not in ("", ()) else ""


def not_text(row: Mapping[str, Any]) -> str:
    """Name the column of a row that holds half of a surrogate pair, at any depth; "" for none. JSON can write one
    (`"\\ud83d"`), but it is no character: no tokenizer, file or terminal takes it."""
    if _is_text(row):
        return ""
    for name, value in row.items():
        if not _is_text(name):
            return f"the name of column {name!a} holds {_HALF}"
        if not _is_text(value):
            return f"column {name!r} holds {_HALF}"
    raise AssertionError("no column holds what the row does")


def _is_text(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError:
        return False
    return True


def listed(numbers: list[int], shown: int = 8) -> str:
    """Return `1, 2 or 4`; of more than `shown` numbers, the last."""
    *others, last = map(str, numbers[-shown:])
    return f"{', '.join(others)} or {last}" if others else last


def _shown(character: str) -> str:
    """Return a character as TOML writes it between double quotes; unprintable ones by their number."""
    if character in _ESCAPES:
        return _ESCAPES[character]
    return character if character.isprintable() else f"\\u{ord(character):04x}"
