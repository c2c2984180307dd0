"""Measure what computing each sequence of a batch takes: its rows, its arithmetic, and what it shares with others.

Only what predicts a loss token is computed: a sequence ends before its last loss token, and one without any is nothing.
Its *prompt* is what stands before its first loss token. Sequences that begin with the same prompt, of more than one
token, are a *family*: in one row they may share the prompt's computation. Suffixes: `_B` a value per sequence, `_T` per
token, `_U` per unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from specs.errors import BatchError
from specs.wire.batch import Batch
from specs.wire.model_flops import DecoderSize

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Chosen = Integers | Sequence[int]

# Where nothing is known of a model: each row is as much work as any other.
_ROWS_ALONE = DecoderSize(layers=0, heads=0, head_size=0, layer_weights=1, head_weights=0)


@dataclass(frozen=True)
class SequenceWork:
    """`rows_B`: of each sequence alone; `prompt_B` of these are its prompt. `flops_B` and `prompt_flops_B` are theirs,
    forward and backward. `family_B`: the first sequence of the family."""

    offset_B: Integers  # where each sequence begins in the batch
    rows_B: Integers
    prompt_B: Integers
    flops_B: Floats
    prompt_flops_B: Floats
    family_B: Integers

    @staticmethod
    def of(batch: Batch, *, size: DecoderSize | None = None, share_prompts: bool = True) -> SequenceWork:
        """Return the work of a batch with `tokens_T` and `loss_mask_T`. `size`: of the model; None: not known."""
        offsets, length_B = batch.offsets, batch["length_B"]
        mask_T = batch["loss_mask_T"] != 0
        if mask_T[offsets[:-1][length_B > 0]].any():
            raise BatchError("loss_mask_T marks the first token of a sequence, which no token predicts")
        # Runs of loss tokens, none of which continues from one sequence to the next.
        begin, end = np.flatnonzero(np.diff(mask_T, prepend=False, append=False)).reshape(-1, 2).T
        first, last = np.searchsorted(begin, offsets[:-1]), np.searchsorted(begin, offsets[1:])
        loss_tokens = np.concatenate([[0], np.cumsum(end - begin)])
        has_B = last > first
        rows_B, prompt_B = np.zeros(len(batch), dtype=np.int64), np.zeros(len(batch), dtype=np.int64)
        rows_B[has_B] = end[last[has_B] - 1] - 1 - offsets[:-1][has_B]
        prompt_B[has_B] = begin[first[has_B]] - offsets[:-1][has_B]
        size = size or _ROWS_ALONE
        return SequenceWork(
            offset_B=offsets[:-1],
            rows_B=rows_B,
            prompt_B=prompt_B,
            flops_B=size.sequence_flops(rows_B) + size.head_flops(loss_tokens[last] - loss_tokens[first]),
            prompt_flops_B=size.sequence_flops(prompt_B),
            family_B=_families(batch["tokens_T"], offsets, prompt_B, rows_B)
            if share_prompts
            else np.arange(len(batch)),
        )

    @staticmethod
    def of_whole(batch: Batch, *, size: DecoderSize | None = None) -> SequenceWork:
        """Return the work of a batch that is computed to the end of each sequence, none of which shares anything."""
        rows_B = batch["length_B"].astype(np.int64)
        return SequenceWork.apart(rows_B, (size or _ROWS_ALONE).sequence_flops(rows_B), batch.offsets[:-1])

    def joined(self, unit_B: Integers) -> JoinedWork:
        """Return the work of units, sequences with the same number in `unit_B`, that are computed together."""
        _, first, unit_B = np.unique(unit_B, return_index=True, return_inverse=True)
        order = np.lexsort((self.family_B, unit_B))
        by_unit = np.split(order, np.cumsum(np.bincount(unit_B))[:-1]) if len(order) else []
        same = (np.diff(unit_B[order]) == 0) & (np.diff(self.family_B[order]) == 0)
        again, count = order[1:][same], len(by_unit)  # those whose prompt another one of their unit has
        one = np.bincount(unit_B[again], minlength=count) + 1 == np.bincount(unit_B, minlength=count)
        _, family = np.unique(np.where(one, self.family_B[first], -1 - np.arange(count)), return_inverse=True)

        def sums(value_B: Integers | Floats, prompt_B: Integers | Floats) -> Floats:
            whole = np.bincount(unit_B, value_B, count)
            return np.asarray(whole - np.bincount(unit_B[again], prompt_B[again], count))

        work = SequenceWork(
            offset_B=self.offset_B[first],
            rows_B=sums(self.rows_B, self.prompt_B).astype(np.int64),
            prompt_B=np.where(one, self.prompt_B[first], 0),
            flops_B=sums(self.flops_B, self.prompt_flops_B),
            prompt_flops_B=np.where(one, self.prompt_flops_B[first], 0.0),
            family_B=family,
        )
        return JoinedWork(work, by_unit)

    @staticmethod
    def apart(rows_B: Integers, flops_B: Floats, offset_B: Integers | None = None) -> SequenceWork:
        """Return the work of sequences that share nothing."""
        none_B = np.zeros(len(rows_B), dtype=np.int64)
        offset_B = none_B if offset_B is None else offset_B
        return SequenceWork(offset_B, rows_B, none_B, flops_B, none_B.astype(np.float64), np.arange(len(rows_B)))

    @cached_property
    def computed(self) -> Integers:
        """The sequences that have any work."""
        return np.flatnonzero(self.rows_B)

    @cached_property
    def shares(self) -> bool:
        """Return whether any family has several sequences."""
        family = self.family_B[self.computed]
        return len(np.unique(family)) < len(family)

    def rows(self, chosen: Chosen) -> int:
        """Count the tokens of these sequences in one row of a model that computes each of their prompts once."""
        chosen = np.asarray(chosen, dtype=np.int64)
        return int(self.rows_B[chosen].sum() - self.prompt_B[self._repeats(chosen)].sum())

    def flops(self, chosen: Chosen) -> float:
        chosen = np.asarray(chosen, dtype=np.int64)
        return float(self.flops_B[chosen].sum() - self.prompt_flops_B[self._repeats(chosen)].sum())

    def _repeats(self, chosen: Integers) -> Integers:
        """Return all but one of each family."""
        if not self.shares:
            return chosen[:0]
        chosen = chosen[self.rows_B[chosen] > 0]
        _, first = np.unique(self.family_B[chosen], return_index=True)
        return np.delete(chosen, first)


@dataclass(frozen=True)
class JoinedWork:
    """`work`: of each unit; one whose sequences all have the same prompt has it too, and may share it with others."""

    work: SequenceWork
    members: list[Integers]

    def sequences(self, units: Chosen) -> Integers:
        """Return the sequences of these units, ascending."""
        return np.sort(np.concatenate([np.zeros(0, dtype=np.int64), *(self.members[unit] for unit in units)]))


def _families(tokens_T: NDArray[np.int32], offsets: Integers, prompt_B: Integers, rows_B: Integers) -> Integers:
    found: dict[bytes, int] = {}
    family_B = np.arange(len(prompt_B))
    for i in np.flatnonzero(prompt_B > 1).tolist():  # one token, such as a BOS, is not worth a segment
        start = offsets[i]
        family_B[i] = found.setdefault(tokens_T[start : start + prompt_B[i]].tobytes(), i)
    return family_B
