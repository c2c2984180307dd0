"""The checksum of a weight from the places where vLLM holds it."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from backends.protocol import WeightSpec
from backends.weights.checksum import checksum_bytes
from backends.weights.word_sum import finish
from specs.errors import SyncError

if TYPE_CHECKING:
    from backends.vllm_rollout.worker import Piece, SummedPiece


def checksum_of(spec: WeightSpec, pieces: Sequence[Piece]) -> str:
    """xxh3-64 of the whole weight. Raises SyncError when the pieces do not make it whole, or when several workers hold
    the same part and differ."""
    if len(pieces) == 1 and pieces[0].shape == tuple(spec.shape) and pieces[0].data.nbytes == spec.nbytes:
        return checksum_bytes(pieces[0].data)
    elements = int(np.prod(spec.shape))
    unit = np.dtype(f"V{spec.nbytes // max(elements, 1) or 1}")
    whole, seen = np.zeros(elements, dtype=unit), np.zeros(elements, dtype=bool)
    index = np.arange(elements)
    for piece in pieces:
        strides = tuple(step * index.itemsize for step in piece.strides)
        place = np.lib.stride_tricks.as_strided(index[piece.offset :], piece.shape, strides).reshape(-1)
        values = piece.data.view(unit)
        again = seen[place]
        if (whole[place[again]] != values[again]).any():
            raise SyncError(f"weight {spec.name}: vLLM's workers hold different values of the same part")
        whole[place], seen[place] = values, True
    if not seen.all():
        raise SyncError(f"weight {spec.name}: vLLM copied {int(seen.sum())} of its {elements} numbers")
    return checksum_bytes(whole.view(np.uint8))


def word_sum_of(spec: WeightSpec, pieces: Sequence[SummedPiece]) -> str:
    """`word_sum` of the whole weight. What several workers hold alike counts once. Raises SyncError when they differ
    there, or when the pieces are not as many numbers as the weight. Where pieces overlap otherwise, the sum is not that
    of the weight."""
    totals: dict[tuple[tuple[int, ...], tuple[int, ...], int], int] = {}
    for piece in pieces:
        if totals.setdefault((piece.shape, piece.strides, piece.offset), piece.total) != piece.total:
            raise SyncError(f"weight {spec.name}: vLLM's workers hold different values of the same part")
    held, elements = sum(prod(shape) for shape, _, _ in totals), prod(spec.shape)
    if held != elements:
        raise SyncError(f"weight {spec.name}: vLLM copied {held} of its {elements} numbers")
    return finish(sum(totals.values()), spec.nbytes)
