"""Tables and values as TOML writes them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any


def dumped(tables: Mapping[str, Any]) -> str:
    """The tables as TOML, a section each."""
    plain = {name: value for name, value in tables.items() if not isinstance(value, Mapping)}
    text = "".join(f"{bare(name)} = {written(value)}\n" for name, value in plain.items())
    for name, value in tables.items():
        if isinstance(value, Mapping):
            text += f"\n[{bare(name)}]\n" + "".join(f"{bare(key)} = {written(one)}\n" for key, one in value.items())
    return text


def written(value: Any) -> str:
    """A value as TOML."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, Mapping):
        inner = ", ".join(f"{bare(name)} = {written(one)}" for name, one in value.items())
        return f"{{ {inner} }}" if inner else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(written, value))}]"
    return str(value.isoformat())  # a date or a time


def bare(name: str) -> str:
    """A key, quoted only where it must be."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _quoted(name)


def _quoted(text: str) -> str:
    """JSON's escapes are among TOML's, but for a half of a surrogate pair and U+007F."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
