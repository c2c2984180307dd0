"""What torchrun says at its end about the rank that failed first. The text is torchrun's: read from torch 2.13.0."""

from __future__ import annotations

import re
from pathlib import Path

from rlctl.processes.launch import tail

_ROOT_CAUSE = re.compile(r"Root Cause.*?rank\s*:\s*(\d+).*?exitcode\s*:\s*(-?\d+)", re.DOTALL)


def first_failure(log_path: Path) -> tuple[int, int] | None:
    """(rank, exit code) of the first failure in torchrun's closing report; None where there is no report."""
    found = _ROOT_CAUSE.findall(tail(log_path, lines=200))
    return (int(found[-1][0]), int(found[-1][1])) if found else None
