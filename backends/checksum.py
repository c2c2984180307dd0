"""Checksums of weights: xxh3-64 of the bytes in wire dtype, as 16 hex digits."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import xxhash
from numpy.typing import NDArray


def checksum_bytes(data: NDArray[np.uint8]) -> str:
    """xxh3-64 of a contiguous byte array."""
    return xxhash.xxh3_64_hexdigest(memoryview(np.ascontiguousarray(data)))


def checksum_weights(weights: Iterable[tuple[str, str]]) -> str:
    """One checksum of many: of the lines `name checksum`, sorted by name, so that order does not matter."""
    lines = sorted(f"{name} {digest}\n" for name, digest in weights)
    return xxhash.xxh3_64_hexdigest("".join(lines).encode())
