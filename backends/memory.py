"""How much memory a rank holds: of its GPU where it has one, else of the host."""

from __future__ import annotations

import ctypes
import resource
import sys
from pathlib import Path

GIB = 2**30


def held_GiB(device: str) -> float:
    """On "cuda": what the allocator has taken from the device, cached blocks too, since nobody else can use those;
    the CUDA context (some hundred MiB) is not in it. On "cpu": resident memory of this process."""
    if device == "cuda":
        import torch

        return torch.cuda.memory_reserved() / GIB
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:  # no Linux: the most there ever was, which is all that can be known
        return peak_GiB(device)
    return pages * resource.getpagesize() / GIB


def peak_GiB(device: str) -> float:
    """The most that `held_GiB` has been since the process began."""
    if device == "cuda":
        import torch

        return torch.cuda.max_memory_reserved() / GIB
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest * (1 if sys.platform == "darwin" else 1024) / GIB


def used_GiB(device: str, before_GiB: float) -> float:
    """The most that was held beyond `before_GiB`, what was there before a model was built: libraries, on the CPU."""
    return max(0.0, peak_GiB(device) - before_GiB)


def hand_back(device: str) -> None:
    """Give what is free inside this process back to the device, or to the host: other roles wait for it."""
    if device == "cuda":
        import torch

        torch.cuda.empty_cache()
    elif sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
