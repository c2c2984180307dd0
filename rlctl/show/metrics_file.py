"""`metrics.jsonl`: one JSON object per line and step. Written as steps end, read by the report and by tools."""

from __future__ import annotations

import errno
import io
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specs.errors import NotFiniteError, RlctlError, RunDirError

Metrics = Mapping[str, Any]


class MetricsWriter:
    """Appends a line per step. A reader never sees half a line, unless the process died inside one write.

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

    def write(self, metrics: Metrics) -> None:
        """Append one step. `metrics["step"]` must be there. Raises RlctlError when the disk refuses, NotFiniteError
        when the line is written but holds a number that is none."""
        assert isinstance(metrics.get("step"), int), "a line of metrics needs `step`"
        plain = {key: value.item() if hasattr(value, "item") else value for key, value in metrics.items()}
        bad = {key: value for key, value in plain.items() if isinstance(value, float) and not math.isfinite(value)}
        line = json.dumps(plain | dict.fromkeys(bad), allow_nan=False)
        data = line.encode() + b"\n"
        start = self._file.seek(0, os.SEEK_END)
        try:
            if self._file.write(data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self._file.truncate(start)  # half a line would spoil the file for --resume
            raise RlctlError(
                f"cannot write {self.path}: {error.strerror}", hint="free disk space, then continue with --resume"
            ) from None
        if bad:
            said = ", ".join(f"{key} is {value}" for key, value in bad.items())
            raise NotFiniteError(f"step {metrics['step']}: {said}", hint="look at the metrics of the steps before")

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All lines, in order. A last line that was cut off by a crash is left out; any other bad line is a RunDirError."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    complete, tail = lines[:-1], lines[-1]
    records = []
    for number, line in enumerate(complete, start=1):
        try:
            record = json.loads(line)
            if not isinstance(record, dict) or not isinstance(record.get("step"), int):
                raise ValueError("not an object with a step")
        except ValueError as error:
            if number == len(complete) and not tail:
                break
            raise RunDirError(f"{path}:{number} is not a line of metrics: {error}", hint="remove the line") from None
        records.append(record)
    return records


def truncate_after(path: Path, step: int) -> int:
    """Drop lines of steps later than `step`, atomically. Returns how many were dropped."""
    if not path.exists():
        return 0
    records = read_metrics(path)
    kept = [record for record in records if record["step"] <= step]
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in kept)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    return len(records) - len(kept)
