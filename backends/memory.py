"""Memory of a rank: of its GPU if it has one, else of the host."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

GIB = 2**30

_borrowed_bytes = 0  # mapped here, owned by another role


def borrow(nbytes: int) -> None:
    """This process maps so many bytes more (or fewer) of another role's memory, which do not count as held here."""
    global _borrowed_bytes
    _borrowed_bytes += nbytes


def held_GiB(device: str) -> float:
    """On "cuda": what the allocator has taken from the device, cached blocks too, since nobody else can use those;
    the CUDA context (some hundred MiB) is not in it. On "cpu": resident memory of this process and of those that it
    started: a sampler may run in a server or an engine process of its own. What two of them share counts twice."""
    if device == "cuda":
        import torch

        return torch.cuda.memory_reserved() / GIB
    try:
        pages = _resident_pages(os.getpid())
    except OSError:  # not Linux: only the peak is available
        return peak_GiB(device)
    held = (pages + sum(_pages_of_started(os.getpid()))) * resource.getpagesize()
    return (held - min(_borrowed_bytes, _resident_shared_bytes())) / GIB


def _resident_pages(process: int) -> int:
    return int(Path(f"/proc/{process}/statm").read_text().split()[1])


def _resident_shared_bytes() -> int:
    """Of memory that processes share without a file. It is the sampler's to say how much of it has pages."""
    for line in Path("/proc/self/status").read_text().splitlines() if _borrowed_bytes else ():
        if line.startswith("RssShmem:"):
            return int(line.split()[1]) * 1024
    return 0


def _pages_of_started(process: int) -> Iterator[int]:
    """Resident pages of each descendant. One that ends meanwhile counts nothing."""
    for listed in Path(f"/proc/{process}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, listed.read_text().split()):
                yield from _pages_of_started(child)
                with contextlib.suppress(OSError):
                    yield _resident_pages(child)


def peak_GiB(device: str) -> float:
    """Peak memory of this process alone since its start."""
    if device == "cuda":
        import torch

        return torch.cuda.max_memory_reserved() / GIB
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return (largest * (1 if sys.platform == "darwin" else 1024) - _borrowed_bytes) / GIB


def hand_back(device: str) -> None:
    """Return free memory of this process to the device or the host, where other roles need it."""
    if device == "cuda":
        import torch

        torch.cuda.empty_cache()
    elif sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
