"""Ask this machine about its GPUs, by the NVIDIA driver's own command, and about its memory."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from specs.memory_parts import GIB

USUAL_GPU_GIB = 80.0


def has_nvidia_driver() -> bool:
    return Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None


@cache
def _smi(*query: str) -> list[str] | None:
    """Return the lines of `nvidia-smi`'s reply; None without the command, or where it fails."""
    command = ["nvidia-smi", *query]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return None


def _least(field: str, *which: str) -> float | None:
    """Return the least value of a field over the GPUs here; None where it is not known."""
    lines = _smi(f"--query-gpu={field}", "--format=csv,noheader,nounits", *which)
    try:
        return min(map(float, lines)) if lines else None
    except ValueError:
        return None


def gpus_left() -> list[str]:
    """Return the GPUs that this process may see, as the driver names them: its device 0 is the first. Empty: all."""
    return [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]


def gpu_capability(devices: Sequence[int]) -> tuple[int, int] | None:
    """Return the lowest compute capability of these GPUs; None where one is not there, or without an answer."""
    left = gpus_left()
    if not devices or (left and max(devices) >= len(left)):
        return None
    found = _least("compute_cap", f"--id={','.join(left[device] if left else str(device) for device in devices)}")
    return None if found is None else (int(found), round(found % 1 * 10))


def gpu_count() -> int | None:
    """Return how many GPUs `nvidia-smi` lists; None where that is not known."""
    listed = _smi("-L")
    return None if listed is None else sum(line.startswith("GPU ") for line in listed)


def gpu_memory_GiB() -> tuple[float, str]:
    """Return the memory of the smallest GPU here, and where the number is from."""
    found = _least("memory.total")
    if found is None:
        return usual_gpu_GiB("no GPU here to ask")
    return found / 1024, f"GPUs have {found / 1024:.1f} GiB, as nvidia-smi says here; --gpu-GiB says another size"


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
