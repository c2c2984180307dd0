"""Splits the slots into segments of similar length, so that little padding is read.

One attention call over n slots reads n · L rows, L the longest. Where lengths differ much, a few calls over
neighbouring slots read fewer. Slots get out of order as sequences come and go; they are sorted again as soon as the
rows read for nothing since the last sort outweigh the sort (the ski-rental rule: at most twice the best cost).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from backends.torch_rollout.kv_cache import Segment

# Rows that an extra attention call must save: its launch costs as much as reading about that many.
LEAST_ROWS_SAVED = 1024
MAX_DEPTH = 2  # up to 4 segments
SORT_COST = 2.0  # a sort reads and writes the cache once: about two reads


def split(read_B: NDArray[np.int64], start: int = 0, depth: int = MAX_DEPTH) -> list[Segment]:
    """Cut neighbouring slots into segments that read few rows. `read_B`: cached positions that each slot reads."""
    n, longest = len(read_B), int(read_B.max())
    whole = [Segment(start, start + n, longest)]
    if depth == 0 or n * longest - int(read_B.sum()) < LEAST_ROWS_SAVED:
        return whole
    count = np.arange(1, n)
    before = np.maximum.accumulate(read_B)[:-1]
    after = np.maximum.accumulate(read_B[::-1])[::-1][1:]
    cost = count * before + (n - count) * after
    cut = int(cost.argmin())
    if n * longest - int(cost[cut]) < LEAST_ROWS_SAVED:
        return whole
    left, right = read_B[: cut + 1], read_B[cut + 1 :]
    return split(left, start, depth - 1) + split(right, start + cut + 1, depth - 1)


def rows_read(segments: list[Segment]) -> int:
    return sum((segment.stop - segment.start) * segment.length for segment in segments)


class Order:
    """Says when the slots should be sorted."""

    def __init__(self) -> None:
        self._wasted = 0.0

    def plan(self, read_B: NDArray[np.int64]) -> tuple[list[Segment], NDArray[np.int64] | None]:
        """Segments for this step, and, when it pays, the order (longest first) to bring the slots into before it."""
        segments = split(read_B)
        rows = rows_read(segments)
        if rows - int(read_B.sum()) < LEAST_ROWS_SAVED:
            return segments, None
        order = np.argsort(-read_B, kind="stable")
        in_order = split(read_B[order])
        self._wasted += rows - rows_read(in_order)
        if self._wasted <= SORT_COST * len(read_B) * int(read_B.max()):
            return segments, None
        self._wasted = 0.0
        return in_order, order
