"""Checksums of weights: xxh3-64 of the bytes in wire dtype, as 16 hex digits."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import xxhash
from numpy.typing import NDArray

CHUNK_BYTES = 256 * 2**10  # fits a core's own cache, source and target together; smaller ones cost interpreter time


def checksum_bytes(data: NDArray[np.uint8]) -> str:
    """xxh3-64 of a contiguous byte array."""
    return xxhash.xxh3_64_hexdigest(memoryview(np.ascontiguousarray(data)))


def copy_with_checksum(source_U: NDArray[np.uint8], target_U: NDArray[np.uint8], *, of: NDArray[np.uint8]) -> str:
    """Copy bytes, and xxh3-64 of `of`, which is one of the two: each chunk is hashed while the cache still holds it, so
    that checking costs no second trip to memory. Both are flat, contiguous and equally long."""
    assert source_U.shape == target_U.shape == of.shape, (source_U.shape, target_U.shape)
    digest = xxhash.xxh3_64()
    for start in range(0, len(of), CHUNK_BYTES):
        chunk = slice(start, start + CHUNK_BYTES)
        target_U[chunk] = source_U[chunk]
        digest.update(of[chunk])
    return digest.hexdigest()


def checksum_weights(weights: Iterable[tuple[str, str]]) -> str:
    """One checksum of many: of the lines `name checksum`, sorted by name, so that order does not matter."""
    lines = sorted(f"{name} {digest}\n" for name, digest in weights)
    return xxhash.xxh3_64_hexdigest("".join(lines).encode())
