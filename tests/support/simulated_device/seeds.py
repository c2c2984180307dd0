"""Defects that are put into a function for the length of a test: its text is changed, and its lines stay the same."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType
from typing import Any


def line_of(function: Any, text: str) -> str:
    """Return where a text of a function stands, as `file:line`."""
    lines, start = inspect.getsourcelines(function)
    own = "".join(lines)
    assert own.count(text) == 1, f"{function.__qualname__} has {own.count(text)} times: {text}"
    return f"{Path(inspect.getfile(function)).name}:{start + own[: own.index(text)].count(chr(10))}"


@contextmanager
def seeded(function: Any, old: str, new: str) -> Iterator[None]:
    assert line_of(function, old)
    assert old.count("\n") == new.count("\n")
    path, own, code = inspect.getfile(function), inspect.getsource(function), function.__code__
    text = Path(path).read_text(encoding="utf-8").replace(own, own.replace(old, new), 1)
    changed = (each for each in _codes(compile(text, path, "exec")) if each.co_qualname == code.co_qualname)
    function.__code__ = next(changed)
    try:
        yield
    finally:
        function.__code__ = code


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _codes(const)
