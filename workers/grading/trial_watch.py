"""What a call of a reward function keeps to itself: errors that it raises and catches again, columns that it reads, or
asks the row for in vain, what it changes in the row, and files that it opens. Only `rlctl check-config` looks."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

_ENDS = (StopIteration, StopAsyncIteration, GeneratorExit)  # of loops, not errors
_MOST = 8


class TrialRow(dict[str, Any]):
    """A row that remembers what it was asked for and has not."""

    def __init__(self, values: Mapping[str, Any], missed: list[str], read: dict[str, None]) -> None:
        super().__init__(values)
        self._missed, self._read = missed, read

    def __getitem__(self, key: str) -> Any:
        self._read[str(key)] = None
        return super().__getitem__(key)

    def __missing__(self, key: str) -> Any:
        self._missed.append(str(key))
        raise KeyError(key)

    def get(self, key: str, *default: Any) -> Any:
        self._read[str(key)] = None
        if key not in self and not default:
            self._missed.append(str(key))
        return super().get(key, *default)

    def keys(self) -> Any:
        self._read_all()
        return super().keys()

    def values(self) -> Any:
        self._read_all()
        return super().values()

    def items(self) -> Any:
        self._read_all()
        return super().items()

    def _read_all(self) -> None:
        self._read.update(dict.fromkeys(map(str, self)))

    def copy(self) -> TrialRow:
        return TrialRow(self, self._missed, self._read)


TrialRow.__name__ = "dict"  # errors of a trial read like those of a run


class TrialWatch:
    """While it is entered, notes the errors that pass through functions of `folder`'s files, raised there or below."""

    def __init__(self, folder: str) -> None:
        self.missed: list[str] = []
        self._read: dict[str, None] = {}
        self._folder = str(Path(folder).resolve())
        self._errors: dict[str, None] = {}
        self._rows: list[tuple[Mapping[str, Any], dict[str, str]]] = []
        self._began, self._seconds = 0.0, 0.0

    def row(self, values: Mapping[str, Any]) -> TrialRow:
        self._rows.append((values, _written(values)))
        return TrialRow(values, self.missed, self._read)

    def __enter__(self) -> TrialWatch:
        self._began = time.thread_time()
        sys.settrace(self._called)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        sys.settrace(None)
        self._seconds = time.thread_time() - self._began

    def report(self) -> dict[str, Any]:
        """`caught`: errors, each with its file and line; `missed`: columns that the row has not; `read`: those that it
        was asked for; `changed`: those whose value is another one afterwards; `seconds` of the processor."""
        changed = [
            name for row, before in self._rows for name, text in before.items() if _written(row).get(name) != text
        ]
        return {
            "caught": list(self._errors)[:_MOST],
            "missed": list(dict.fromkeys(self.missed))[:_MOST],
            "read": list(self._read),
            "changed": changed[:_MOST],
            "seconds": self._seconds,
        }

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


def _written(row: Mapping[str, Any]) -> dict[str, str]:
    """Columns that hold lists or objects, which every completion of the row is given again."""
    return {
        name: json.dumps(value, default=repr) for name, value in dict(row).items() if isinstance(value, list | dict)
    }


class OpenedFiles:
    """Files that are opened to be read by a path relative to the working folder, from now on."""

    def __init__(self) -> None:
        self.found: dict[str, None] = {}
        sys.addaudithook(self._heard)

    def _heard(self, event: str, given: tuple[Any, ...]) -> None:
        if event != "open" or not isinstance(given[0], str) or len(self.found) >= _MOST:
            return
        path, mode = given[0], given[1]
        reads = mode is None or not set("wax") & set(str(mode))
        if reads and not os.path.isabs(path) and os.path.isfile(path) and not path.endswith((".py", ".pyc")):
            self.found[path] = None
