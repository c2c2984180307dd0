"""What the NVIDIA driver reports about this machine's GPUs."""

from __future__ import annotations

import shutil
import subprocess
from functools import cache


@cache
def gpu_capability() -> tuple[int, int] | None:
    """The lowest compute capability of this machine's GPUs; None without a GPU, or when the driver does not answer."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.split()
        return min((int(line.split(".")[0]), int(line.split(".")[1])) for line in told)
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


def gpu_count() -> int | None:
    """GPUs of this machine, as `nvidia-smi` lists them; None where that is not known."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines()) if listed.returncode == 0 else None
