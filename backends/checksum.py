"""Checksums of weights: xxh3-64 of the bytes in wire dtype, as 16 hex digits.

What hashing costs is counted where it happens, since it is interleaved with copying: `seconds()` of this process.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import numpy as np
import xxhash
from numpy.typing import NDArray

CHUNK_BYTES = 256 * 2**10  # fits a core's own cache, source and target together; smaller ones cost interpreter time


_spent_s = 0.0


def seconds() -> float:
    """Seconds that this process has spent hashing since it began."""
    return _spent_s


class Digest:
    """xxh3-64 of bytes that come piece by piece."""

    def __init__(self) -> None:
        self._digest = xxhash.xxh3_64()

    def update(self, data: NDArray[np.uint8]) -> None:
        """`data` is contiguous."""
        global _spent_s
        started = time.perf_counter()
        self._digest.update(data)
        _spent_s += time.perf_counter() - started

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


def checksum_bytes(data: NDArray[np.uint8]) -> str:
    """xxh3-64 of a contiguous byte array."""
    digest = Digest()
    digest.update(np.ascontiguousarray(data))
    return digest.hexdigest()


def copy_with_checksum(source_U: NDArray[np.uint8], target_U: NDArray[np.uint8], *, of: NDArray[np.uint8]) -> str:
    """Copy bytes, and xxh3-64 of `of`, which is one of the two: each chunk is hashed while the cache still holds it, so
    that checking costs no second trip to memory. Both are flat, contiguous and equally long."""
    assert source_U.shape == target_U.shape == of.shape, (source_U.shape, target_U.shape)
    digest = Digest()
    for start in range(0, len(of), CHUNK_BYTES):
        chunk = slice(start, start + CHUNK_BYTES)
        target_U[chunk] = source_U[chunk]
        digest.update(of[chunk])
    return digest.hexdigest()


def checksum_weights(weights: Iterable[tuple[str, str]]) -> str:
    """One checksum of many: of the lines `name checksum`, sorted by name, so that order does not matter."""
    lines = sorted(f"{name} {digest}\n" for name, digest in weights)
    return xxhash.xxh3_64_hexdigest("".join(lines).encode())
