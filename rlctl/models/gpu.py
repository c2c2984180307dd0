"""Asks the NVIDIA driver about this machine's GPUs."""

from __future__ import annotations

import shutil
import subprocess
from functools import cache


@cache
def gpu_capability() -> tuple[int, int] | None:
    """Return the lowest compute capability of this machine's GPUs; None without a GPU, or without an answer."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        reply = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.split()
        return min((int(line.split(".")[0]), int(line.split(".")[1])) for line in reply)
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


def gpu_count() -> int | None:
    """Return how many GPUs `nvidia-smi` lists; None where that is not known."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines()) if listed.returncode == 0 else None
