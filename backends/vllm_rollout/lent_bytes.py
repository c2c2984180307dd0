"""Bytes of weights on their way to vLLM's workers, which map the memory in which this process holds them: vLLM itself
would pickle them, once for each worker."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_ALIGNED = 64  # bytes


class Lent(NamedTuple):
    """Where bytes lie: in a file that processes of one host see."""

    path: str
    offset: int
    nbytes: int

    def mapped(self) -> NDArray[np.uint8]:
        """Return the bytes themselves, until the lender writes others there; only to be read."""
        return np.memmap(self.path, np.uint8, "r+", self.offset, (self.nbytes,))


class Lender:
    """Memory without a name, which goes with this process. It grows to the most that was ever lent."""

    def __init__(self) -> None:
        self._file = -1
        self._memory = np.empty(0, dtype=np.uint8)

    def lend(self, buffers: Sequence[NDArray[np.uint8]]) -> list[Lent]:
        """Copy these there, in place of what was lent before."""
        starts = [0, *accumulate(-(-len(buffer) // _ALIGNED) * _ALIGNED for buffer in buffers)]
        if starts[-1] > len(self._memory):
            self._file = os.memfd_create("rlctl-weights") if self._file < 0 else self._file
            os.ftruncate(self._file, starts[-1])
            self._memory = np.frombuffer(mmap.mmap(self._file, starts[-1]), dtype=np.uint8)
        for start, buffer in zip(starts, buffers, strict=False):
            self._memory[start : start + len(buffer)] = buffer
        path = f"/proc/{os.getpid()}/fd/{self._file}"
        return [Lent(path, start, len(buffer)) for start, buffer in zip(starts, buffers, strict=False)]
