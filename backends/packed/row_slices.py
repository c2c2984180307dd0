"""Packed rows that several ranks share: each computes a part, and keeps the loss tokens that its rows predict.

T: tokens of the whole row, N: loss tokens.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from backends.packed.packing import MicroBatch
from backends.ulysses.sequence_group import SequenceGroup


def part_of(micro: MicroBatch, group: SequenceGroup) -> MicroBatch:
    """The micro-batch as this rank computes it. Its row is still the whole one, with a segment of its own at the end
    where it lacks tokens to be split into equal parts. Its loss tokens are those that this rank's rows predict (there
    may be none), and `hidden_N` counts from the first of these rows."""
    if group.alone:
        return micro
    row = padded(micro, group.padding(micro.num_tokens))
    place_T = np.full(row.num_tokens, -1)
    rows = group.own_rows(row.num_tokens)
    place_T[rows] = np.arange(len(rows))
    place_N = place_T[row.hidden_N]
    own = place_N >= 0
    return replace(row, hidden_N=place_N[own], target_N=row.target_N[own], column_N=row.column_N[own])


def padded(micro: MicroBatch, tokens: int) -> MicroBatch:
    """With so many more tokens at the end of its row, which are a segment of their own."""
    if not tokens:
        return micro
    return replace(
        micro,
        lengths=[*micro.lengths, tokens],
        parents=[*micro.parents, -1],
        tokens_T=np.concatenate([micro.tokens_T, np.zeros(tokens, dtype=micro.tokens_T.dtype)]),
        positions_T=np.concatenate([micro.positions_T, np.arange(tokens)]),
    )
