"""Write and read `journal.jsonl`: what happened in a run, attempt by attempt: starts, warnings, ends."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import Any

from rlctl.show.metrics_file import read_samples
from specs.errors import RunDirError
from specs.terminal import json_text

FILE = "journal.jsonl"
EVALUATION = "evaluation"  # the event of an attempt that makes no steps
TAKEN = {"event": str, "attempt": int, "spec_dir": str, "copy": str}  # what readers take as it is


class Journal:
    """Append the events of one attempt."""

    def __init__(self, run_dir: Path, attempt: int) -> None:
        self.path, self.attempt = run_dir / FILE, attempt

    def add(self, event: str, **fields: Any) -> None:
        """Append a line; behind half of one, which a full disk or a kill has left, a new one. Raises OSError."""
        line = {"time": round(time.time(), 3), "attempt": self.attempt, "event": event, **fields}
        with open(self.path, "ab+") as file:
            file.seek(max(0, file.tell() - 1))
            behind = b"" if file.read(1) in (b"", b"\n") else b"\n"
            file.write(behind + json_text(line).encode() + b"\n")

    def note(self, event: str, **fields: Any) -> None:
        """Append a line that nothing depends on: on a full disk it is lost."""
        with suppress(OSError):
            self.add(event, **fields)


def read_journal(run_dir: Path) -> list[dict[str, Any]]:
    """Return all lines that can be read."""
    try:
        lines = [{"event": None, **line} for line in read_samples(run_dir / FILE)]
        return [line for line in lines if all(isinstance(line.get(key, kind()), kind) for key, kind in TAKEN.items())]
    except RunDirError:
        return []


def first_day(run_dir: Path) -> str:
    """Return the day on which a run began, as 2026-01-31: chat templates that write today's write that one throughout.
    A new run begins today."""
    times = (line.get("time") for line in read_journal(run_dir))
    began = next((when for when in times if isinstance(when, int | float)), time.time())
    return date.fromtimestamp(began).isoformat()


def last_attempt(journal: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the newest attempt's `end`, or its `start` where none was written: it runs, or was killed."""
    return next((line for line in reversed(journal) if line["event"] in ("start", "end")), {})


def is_evaluation(journal: Sequence[Mapping[str, Any]]) -> bool:
    """Tell whether the newest attempt is that of `rlctl eval`."""
    last = last_attempt(journal).get("attempt")
    return any(line["event"] == EVALUATION and line.get("attempt") == last for line in journal)


def newest(run_dir: Path, name: str) -> Path:
    """Return what the last attempt wrote as `name`.json or `name`.attempt_N.json."""
    found = {path: re.fullmatch(rf"{name}\.attempt_(\d+)\.json", path.name) for path in run_dir.glob(f"{name}.*")}
    later = {int(match[1]): path for path, match in found.items() if match}
    return later[max(later)] if later else run_dir / f"{name}.json"
