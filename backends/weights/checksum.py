"""Checksums of weights whose bytes are in host memory: xxh3-64 of them in wire dtype, as 16 hex digits.

Of those on a device: `word_sum.py`.

Time of hashing is counted here, since hashing is interleaved with copying: `seconds()` of this process.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import xxhash
from numpy.typing import NDArray

BLOCK_BYTES = 512 * 2**10  # copied, then hashed while the cache holds it; smaller ones cost interpreter time


_spent_s = 0.0


def seconds() -> float:
    """Seconds that this process has spent hashing since it began."""
    return _spent_s


@contextmanager
def hashing() -> Iterator[None]:
    """Count the time within, to which what a device was asked for before belongs too where its answer is awaited."""
    global _spent_s
    started = time.perf_counter()
    try:
        yield
    finally:
        _spent_s += time.perf_counter() - started


class Digest:
    """xxh3-64 of bytes that come piece by piece."""

    def __init__(self) -> None:
        self._digest = xxhash.xxh3_64()

    def update(self, data: NDArray[np.uint8]) -> None:
        """`data` is contiguous."""
        global _spent_s
        started = time.perf_counter()
        self._digest.update(data.data)
        _spent_s += time.perf_counter() - started

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


def checksum_bytes(data: NDArray[np.uint8]) -> str:
    """xxh3-64 of a contiguous byte array."""
    digest = Digest()
    digest.update(np.ascontiguousarray(data))
    return digest.hexdigest()


def blocks_of(bytes_U: NDArray[np.uint8]) -> Iterator[NDArray[np.uint8]]:
    """A byte array in pieces that a core's cache holds until they are hashed."""
    return (bytes_U[start : start + BLOCK_BYTES] for start in range(0, len(bytes_U), BLOCK_BYTES))


def checksum_weights(weights: Iterable[tuple[str, str]]) -> str:
    """One checksum of many: of the lines `name checksum`, sorted by name, so that order does not matter."""
    lines = sorted(f"{name} {digest}\n" for name, digest in weights)
    return xxhash.xxh3_64_hexdigest("".join(lines).encode())
