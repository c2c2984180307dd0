"""What a call of a reward function keeps to itself: errors that it raises and catches again, and columns that it asks
the row for in vain. Only `rlctl check-config` looks."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

_ENDS = (StopIteration, StopAsyncIteration, GeneratorExit)  # of loops, not errors
_MOST = 8


class TrialRow(dict[str, Any]):
    """A row that remembers what it was asked for and has not."""

    def __init__(self, values: Mapping[str, Any], missed: list[str]) -> None:
        super().__init__(values)
        self._missed = missed

    def __missing__(self, key: str) -> Any:
        self._missed.append(str(key))
        raise KeyError(key)

    def get(self, key: str, *default: Any) -> Any:
        if key not in self and not default:
            self._missed.append(str(key))
        return super().get(key, *default)

    def copy(self) -> TrialRow:
        return TrialRow(self, self._missed)


TrialRow.__name__ = "dict"  # errors of a trial read like those of a run


class TrialWatch:
    """While it is entered, notes the errors that pass through functions of `folder`'s files, raised there or below."""

    def __init__(self, folder: str) -> None:
        self.missed: list[str] = []
        self._folder = str(Path(folder).resolve())
        self._errors: dict[str, None] = {}

    def row(self, values: Mapping[str, Any]) -> TrialRow:
        return TrialRow(values, self.missed)

    def __enter__(self) -> TrialWatch:
        sys.settrace(self._called)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        sys.settrace(None)

    def report(self) -> dict[str, list[str]]:
        """`caught`: errors, each with its file and line; `missed`: columns that the row has not."""
        return {"caught": list(self._errors)[:_MOST], "missed": list(dict.fromkeys(self.missed))[:_MOST]}

    def _called(self, frame: FrameType, event: str, value: Any) -> Any:
        file = frame.f_code.co_filename
        if not file.startswith(self._folder) or "site-packages" in file:
            return None
        frame.f_trace_lines = False
        return self._in_function

    def _in_function(self, frame: FrameType, event: str, value: Any) -> Any:
        if event == "exception" and not issubclass(value[0], _ENDS):
            place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
            self._errors.setdefault(f"{value[0].__name__}: {value[1]} ({place})"[:300])
        return self._in_function
