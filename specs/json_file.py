"""Read JSON files that a crash or a person may have touched, and replace files; tell how deep JSON is."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from specs.text import LFS, LFS_POINTER


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises ValueError with a predicate: "is not there", "is not JSON, …"."""
    try:
        if not path.is_file():  # opening a pipe would wait
            raise ValueError("is not a file" if os.path.lexists(path) else "is not there")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"is not text: {error}") from None
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        if text.startswith(LFS):
            raise ValueError(LFS_POINTER) from None
        raise ValueError(f"is cut short or not JSON: {error}" if text else "is empty") from None
    if not isinstance(content, dict):
        raise ValueError(f"holds a {type(content).__name__} where an object belongs")
    return content


def object_of(text: str | bytes) -> dict[str, Any] | None:
    """Return the JSON object in a text; None where it holds none."""
    with suppress(ValueError, RecursionError):
        if isinstance(content := json.loads(text), dict):
            return content
    return None


def depth_of(value: Any) -> int:
    """Return how deeply JSON is nested, however deep that is."""
    depth, level = 0, [value]
    while level:
        depth += 1
        held = (one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list))
        level = [inner for each in held for inner in each]
    return depth


def read_or_empty(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, {} where it cannot be read."""
    try:
        return read_object(path)
    except ValueError:
        return {}


def replace_file(path: Path, content: bytes | bytearray) -> None:
    """Replace the file in one step. Raises OSError."""
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(content)
    os.replace(partial, path)


def write_object(path: Path, content: Mapping[str, Any]) -> None:
    """Replace the file in one step. Raises OSError."""
    replace_file(path, (json.dumps(content, indent=2) + "\n").encode())
