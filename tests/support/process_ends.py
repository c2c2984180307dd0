"""Whether a process that a test knows by its number has ended."""

from __future__ import annotations

import time
from pathlib import Path


def ended(pid: int) -> bool:
    """Whether a process is gone, or dead and not yet collected by whoever adopted it."""
    for _ in range(1200):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False
