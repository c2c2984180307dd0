"""What torchrun says at its end about the ranks that failed. The text is torchrun's: read from torch 2.13.0."""

from __future__ import annotations

import re
from pathlib import Path

from rlctl.processes.launch import tail

_ROOT_CAUSE = "Root Cause"
_FAILURE = re.compile(r"^\s*rank\s*:\s*(\d+).*?exitcode\s*:\s*(-?\d+)", re.DOTALL | re.MULTILINE)
_REPORT = "Failures:"


def codes_of_failures(log_path: Path) -> dict[int, int]:
    """Rank → exit code in torchrun's closing report, the one that it saw first at the beginning; empty where there is
    no report. What ended between two of its looks it has in the order of ranks."""
    text = tail(log_path, lines=200)
    others, _, root = text.rpartition(_ROOT_CAUSE)
    failures = [*_FAILURE.findall(root)[:1], *_FAILURE.findall(others.rpartition(_REPORT)[2])] if others else []
    codes: dict[int, int] = {}
    for rank, code in failures:
        codes.setdefault(int(rank), int(code))
    return codes
