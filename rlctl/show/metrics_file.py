"""Write and read `metrics.jsonl` and `samples.jsonl`: JSON objects, one per line, written as steps end."""

from __future__ import annotations

import errno
import io
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from specs.errors import NotFiniteError, RlctlError, RunDirError
from specs.json_file import object_of
from specs.terminal import json_text


class MetricsWriter:
    """Append a line per step. A reader never sees half a line, unless the process died inside one write.

    `resume_step` drops the lines of later steps first: they will be written again. Without it an existing
    file that holds lines is refused (RunDirError), so that two runs never mix.
    A number that is not finite is written as null, and ends the run.
    """

    def __init__(self, path: Path, *, resume_step: int | None = None) -> None:
        self.path = path
        if resume_step is not None:
            truncate_after(path, resume_step)
        elif path.exists() and path.stat().st_size > 0:
            raise RunDirError(f"{path} already holds metrics", hint="continue it with --resume, or use another run dir")
        self._file: io.FileIO = path.open("ab", buffering=0)

    def write(self, metrics: Mapping[str, Any]) -> None:
        """Append one step. `metrics["step"]` must be there. Raises RlctlError when the disk refuses, NotFiniteError
        when the line is written but holds a number that is none."""
        assert isinstance(metrics.get("step"), int), "a line of metrics needs `step`"
        data, bad = _encoded(metrics)
        start = self._file.seek(0, os.SEEK_END)
        try:
            if self._file.write(data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            with suppress(OSError):  # the disk that refused a line may refuse this, too
                self._file.truncate(start)  # half a line would spoil the file for --resume
            hint = "free disk space, then continue with --resume"
            raise RlctlError(f"cannot write {self.path}: {error.strerror}", hint=hint) from None
        _refuse(metrics["step"], bad)

    def add_to_last(self, more: Mapping[str, Any]) -> None:
        """Add metrics to the last line, atomically. Raises OSError."""
        *before, last = _lines(self.path)[0]
        record = _record(last)
        data, bad = _encoded({**record, **more})
        _replace(self.path, [*before, data.rstrip()])
        self._file.close()
        self._file = self.path.open("ab", buffering=0)
        _refuse(record["step"], bad)

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _encoded(metrics: Mapping[str, Any]) -> tuple[bytes, dict[str, float]]:
    """Return a line with null for each number that is not finite, and those."""
    plain = {key: value.item() if hasattr(value, "item") else value for key, value in metrics.items()}
    bad = {key: value for key, value in plain.items() if isinstance(value, float) and not math.isfinite(value)}
    return json.dumps(plain | dict.fromkeys(bad), allow_nan=False).encode() + b"\n", bad


def _refuse(step: int, bad: Mapping[str, float]) -> None:
    if bad:
        listed = ", ".join(f"{key} is {value}" for key, value in bad.items())
        raise NotFiniteError(f"step {step}: {listed}", hint="look at the metrics of the steps before")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return all lines, in order. A last line that was cut off by a crash is left out; any other bad line is a
    RunDirError."""
    records: list[dict[str, Any]] = []
    lines, torn = _lines(path)
    for number, line in enumerate(lines, start=1):
        try:
            records.append(_record(line))
        except ValueError as error:
            if number == len(lines) and not torn:
                break
            raise RunDirError(f"{path}:{number} is not a line of metrics: {error}", hint="remove the line") from None
    return records


def read_end(path: Path, share: float) -> list[dict[str, Any]]:
    """Return the last line behind the last one with an evaluation; where there is none, the last `share` of all. No
    other line is decoded: there may be many, in many runs. In place of a damaged one counts the one before. Raises
    RunDirError."""
    lines = _lines(path)[0]
    evaluated = _last([line for line in lines if b'"eval/' in line], 1)
    steps = _last(lines, 1 if evaluated else max(1, round(share * len(lines))))
    return [*(record for record in evaluated if record not in steps), *steps]


def _last(lines: Sequence[bytes], most: int) -> list[dict[str, Any]]:
    """Return the last records of steps, in order."""
    records = (record for line in reversed(lines) if isinstance((record := object_of(line) or {}).get("step"), int))
    return [*islice(records, most)][::-1]


def last_values(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the last value of every metric: evaluations are not in every line."""
    return {key: value for record in records for key, value in record.items() if value is not None}


def truncate_after(path: Path, step: int, warn: Callable[[str], None] | None = None) -> None:
    """Drop lines of steps later than `step`, atomically. A line that cannot be read raises RunDirError; where there is
    `warn`, nothing depends on the file, and such a line is dropped."""
    if warn is None:
        read_metrics(path)
    kept, bad = [], 0
    for line in _lines(path)[0]:
        try:
            kept += [line] if _record(line)["step"] <= step else []
        except ValueError:
            bad += 1
    if bad and warn is not None:
        warn(f"{path.name}: {bad} of its lines cannot be read, and are dropped")
    if path.exists():
        _replace(path, kept)


def _replace(path: Path, lines: Iterable[bytes]) -> None:
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.writelines(line + b"\n" for line in lines)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def append_samples(path: Path, step: int, samples: Iterable[Mapping[str, Any]]) -> None:
    """Append the samples of a step, a line each. Raises OSError."""
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json_text({"step": step, **sample}) + "\n" for sample in samples)


def read_samples(path: Path) -> list[dict[str, Any]]:
    """Return what can be read of `samples.jsonl`. Raises RunDirError."""
    return [*each_sample(path)]


def each_sample(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the same, one by one: all completions of all evaluations may be more than memory holds."""
    try:
        with path.open("rb") as file:
            yield from (sample for line in file if (sample := object_of(line)) is not None)
    except FileNotFoundError:
        return
    except OSError as error:
        raise _unreadable(path, error) from None


def _lines(path: Path) -> tuple[list[bytes], bool]:
    """Return the lines that end, and whether there is half a line behind them. Raises RunDirError."""
    try:
        *complete, tail = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return [], False
    except OSError as error:
        raise _unreadable(path, error) from None
    return complete, bool(tail)


def _unreadable(path: Path, error: OSError) -> RunDirError:
    return RunDirError(f"{path} cannot be read: {error.strerror}", hint="have it readable, or move it away")


def _record(line: bytes) -> dict[str, Any]:
    """Raises ValueError."""
    record = json.loads(line)
    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
        raise ValueError("not an object with a step")
    return record
