"""Memory of a rank: of its GPU if it has one, else of the host."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from specs.memory_parts import GIB

LOOK_EVERY_S = 0.005
NEVER_FROM_THE_HEAP = 2**25
"""Bytes: glibc maps what is larger, however much of its heap is free."""
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # as malloc.h numbers them


def held_GiB(device: str) -> float:
    """On "cuda": what the allocator has taken from the device, cached blocks too, since nobody else can use those;
    the CUDA context (some hundred MiB) is not in it. On "cpu": resident memory of this process and of those that it
    started: a sampler may run in a server or an engine process of its own. What two of them share counts twice. Pages
    of files (code, weights that are being read) do not count: the kernel takes them back when memory runs out."""
    if device == "cuda":
        import torch

        return torch.cuda.memory_reserved() / GIB
    return (_unmapped(_status_bytes(os.getpid())) + sum(_held_by_started(os.getpid()))) / GIB


def _status_bytes(process: int) -> dict[str, int]:
    """Memory of a process by the kernel's names: `RssAnon`, `RssShmem`, `RssFile`, `VmHWM`."""
    rows = (line.split() for line in Path(f"/proc/{process}/status").read_text().splitlines())
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if row[0].startswith(("Rss", "VmHWM"))}


def _unmapped(status: Mapping[str, int]) -> int:
    """Return the resident bytes that are no file's."""
    return status["RssAnon"] + status["RssShmem"]


def _held_by_started(process: int) -> Iterator[int]:
    """Bytes that descendants hold. One that ends meanwhile counts nothing."""
    for listed in Path(f"/proc/{process}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, listed.read_text().split()):
                yield from _held_by_started(child)
                with contextlib.suppress(OSError, KeyError):  # KeyError: it has ended, and nobody has asked how
                    yield _unmapped(_status_bytes(child))


def peak_GiB(device: str) -> float:
    """Peak memory of this process alone: on "cuda" since its start, on "cpu" since the last `forget_peak`, without
    the files' pages of now."""
    if device == "cuda":
        import torch

        return torch.cuda.max_memory_reserved() / GIB
    status = _status_bytes(os.getpid())
    return (status["VmHWM"] - status["RssFile"]) / GIB


def forget_peak(device: str) -> None:
    """The host's peak starts again. Where the system does not do that, it stays that since the process's start."""
    if device == "cpu":
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")


@contextlib.contextmanager
def sampled_peak(device: str) -> Iterator[Callable[[], float]]:
    """Sample the most that the block holds of the host, in GiB, every few milliseconds; ask for it afterwards. The
    kernel's own peak has the pages of files in it that a block maps and lets go of again, as reading weights does. On
    "cuda" that is not so: `peak_GiB`."""
    peaks, done = [0.0], threading.Event()

    def look() -> None:
        while not done.wait(LOOK_EVERY_S):
            peaks[0] = max(peaks[0], held_GiB(device))

    looking = threading.Thread(target=look, name="memory", daemon=True)
    if device == "cpu":
        looking.start()
    try:
        yield lambda: peaks[0]
    finally:
        done.set()
        if looking.is_alive():
            looking.join()
        peaks[0] = max(peaks[0], held_GiB(device))


def hand_back(device: str) -> None:
    """Return free memory of this process to the device or the host, where other roles need it."""
    if device == "cuda":
        import torch

        torch.cuda.empty_cache()
    elif hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def keep_freed(device: str) -> None:
    """Let a process that computes on the host keep what it frees, up to a GiB, until `hand_back`. glibc returns what is
    above 64 MiB at once, so that every micro-batch would get its pages from the kernel anew: a tenth of an update's
    time."""
    if device == "cpu" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, NEVER_FROM_THE_HEAP)  # at once: a limit that is set no longer grows
        libc.mallopt(M_TRIM_THRESHOLD, 2**30)
