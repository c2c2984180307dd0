"""`RUN/reward_failures.jsonl`: the samples that could not be graded, and why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MAX_RECORDS = 1000  # per start of the role; later ones are only counted
MAX_CHARACTERS = 8192  # of any text in a record
# Errors of code that no retry and no network mends.
_OF_CODE = (
    *("TypeError", "NameError", "AttributeError", "KeyError", "IndexError", "UnboundLocalError", "SyntaxError"),
    *("ModuleNotFoundError", "ImportError", "AssertionError", "ZeroDivisionError", "RecursionError", "ValueError"),
)


def last_line(text: str) -> str:
    """Return the last line of a failed grade's text: that of its error."""
    return (text.strip().splitlines() or [""])[-1]


def is_of_code(cause: str, text: str) -> bool:
    """Return whether a call failed of the code itself."""
    return cause in ("bad_values", "crashes") or last_line(text).partition(":")[0] in _OF_CODE


class FailureLog:
    """Appends records up to a limit. On a full disk the record is lost and the step continues."""

    def __init__(self, path: Path) -> None:
        self.path, self._left = path, MAX_RECORDS

    def append(self, records: list[dict[str, Any]]) -> None:
        chosen, self._left = records[: self._left], max(self._left - len(records), 0)
        if not chosen:
            return
        lines = [json.dumps({name: _clip(value) for name, value in one.items()}, default=str) for one in chosen]
        try:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write("".join(f"{line}\n" for line in lines))
        except OSError as error:
            print(f"{self.path}: {error.strerror}; {len(chosen)} records are lost", flush=True)


def _clip(value: Any) -> Any:
    if isinstance(value, str) and len(value) > MAX_CHARACTERS:
        return f"{value[:MAX_CHARACTERS]}… ({len(value)} characters)"
    return value
