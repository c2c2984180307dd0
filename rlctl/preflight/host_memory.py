"""How much memory this machine has."""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress
from pathlib import Path

from specs.memory_parts import GIB

USUAL_GPU_GIB = 80.0


def gpu_memory_GiB() -> tuple[float, str]:
    """Return the memory of the smallest GPU here, and where the number is from."""
    with suppress(OSError, ValueError, subprocess.SubprocessError):
        query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
        answer = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
        smallest = min(float(line) for line in answer.stdout.split()) / 1024
        return smallest, f"GPUs have {smallest:.1f} GiB, as nvidia-smi says here; --gpu-GiB says another size"
    return usual_gpu_GiB("there is none here to ask")


def usual_gpu_GiB(why: str) -> tuple[float, str]:
    """Return what a GPU is taken to have that cannot be asked, and a note that says why."""
    return USUAL_GPU_GIB, f"GPUs are taken to have {USUAL_GPU_GIB:g} GiB: {why}; --gpu-GiB says it"


def host_memory_GiB() -> float:
    """Return the memory of this machine, or of the container that it is; 0 where it cannot be asked."""
    try:
        whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 0.0
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
    except (OSError, ValueError):
        limit = whole
    return min(whole, limit) / GIB
