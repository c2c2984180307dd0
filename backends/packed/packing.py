"""Packs sequences into micro-batches; sequences with a common prompt may share its rows.

No padding: a micro-batch is one row of segments that lie one after another. A segment is a whole sequence, or a prompt
that several sequences begin with, or what one of these adds to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from specs.errors import BatchError
from specs.schema.algorithms.algorithm import Loss
from specs.wire.batch import Batch
from specs.wire.bodies import LossScale
from specs.wire.model_flops import DecoderSize
from specs.wire.partition import Part, even_rows, fewest_rows, in_step
from specs.wire.sequence_work import SequenceWork

if TYPE_CHECKING:  # it imports torch
    from backends.ulysses.sequence_group import SequenceGroup


@dataclass(frozen=True)
class MicroBatch:
    """Sequences packed in a row. T: tokens that are computed; N: loss tokens, sequence by sequence."""

    lengths: list[int]  # of the segments
    parents: list[int]  # the segment that each one continues, -1: none
    tokens_T: NDArray[np.int64]
    positions_T: NDArray[np.int64]  # positions in the sequence, from 0
    hidden_N: NDArray[np.int64]  # row that predicts each loss token: the one before it
    target_N: NDArray[np.int64]  # the loss token itself
    column_N: NDArray[np.int64]  # where it stands in the batch's `_T` columns
    sequence_M: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))  # in the order of N

    @property
    def num_tokens(self) -> int:
        return len(self.tokens_T)

    def padded(self, tokens: int) -> MicroBatch:
        """Return it with so many more tokens at the end of its row, which are a segment of their own."""
        if not tokens:
            return self
        return replace(
            self,
            lengths=[*self.lengths, tokens],
            parents=[*self.parents, -1],
            tokens_T=np.concatenate([self.tokens_T, np.zeros(tokens, dtype=self.tokens_T.dtype)]),
            positions_T=np.concatenate([self.positions_T, np.arange(tokens)]),
        )

    def part_of(self, group: SequenceGroup) -> MicroBatch:
        """Return it as this rank of a group that shares its row computes it. The row is still the whole one, padded
        where it lacks tokens to be split into equal parts. Its loss tokens are those that this rank's rows predict
        (there may be none), and `hidden_N` counts from the first of these rows."""
        if group.alone:
            return self
        row = self.padded(group.padding(self.num_tokens))
        place_T = np.full(row.num_tokens, -1)
        rows = group.own_rows(row.num_tokens)
        place_T[rows] = np.arange(len(rows))
        place_N = place_T[row.hidden_N]
        own = place_N >= 0
        return replace(row, hidden_N=place_N[own], target_N=row.target_N[own], column_N=row.column_N[own])


@dataclass(frozen=True)
class Budget:
    """The tokens that a rank computes at once: never more. Where `ranks` share a row, each has an equal slice of it,
    and the row may have so many times as many. `key`: what the spec calls it."""

    tokens: int
    ranks: int = 1
    key: str = "micro_batch_tokens"

    @property
    def row_tokens(self) -> int:
        return self.tokens * self.ranks

    def check(self, length_B: NDArray[np.int64]) -> None:
        """Raises BatchError for the first sequence that no row can hold."""
        over = np.flatnonzero(length_B > self.row_tokens)
        if not len(over):
            return
        shared = f" × {self.ranks} ranks that share a row" if self.ranks > 1 else ""
        raise BatchError(
            f"sequence {over[0]} has {length_B[over[0]]} tokens, over {self.key} = {self.tokens}{shared}",
            hint=f"raise {self.key} or sequence_parallel of the role, or lower the limits on tokens under [data]",
        )

    def check_units(self, unit_B: NDArray[np.int64], rows_U: NDArray[np.int64]) -> None:
        """Raises BatchError for the first unit that no row can hold. `rows_U`: with a shared prompt counted once."""
        if len(over := np.flatnonzero(rows_U > self.row_tokens)):
            rows = f"the sequences of unit {np.unique(unit_B)[over[0]]} together compute {rows_U[over[0]]} tokens"
            raise BatchError(
                f"{rows}, over {self.key} = {self.tokens}, and they belong in one micro-batch",
                hint=f"raise {self.key} (two sequences and their prompt must fit), or lower data.max_tokens",
            )


class MicroBatches:
    """A batch's micro-batches, those with most work first. A row is made when it is asked for, while the device may
    still compute the one before. `rounds`: how many all ranks make; this one may have fewer."""

    def __init__(
        self,
        batch: Batch,
        work: SequenceWork,
        parts: Sequence[Part],
        rounds: int,
        column_T: NDArray[np.int64] | None = None,
        part: Callable[[MicroBatch], MicroBatch] | None = None,
    ) -> None:
        """`column_T`: what `column_N` says of each token, if not where it stands. `part`: as in `Packing`."""
        self.rounds, self._part = rounds, part
        self._batch, self._work, self._parts, self._column_T = batch, work, parts, column_T
        self._mask_T = batch["loss_mask_T"] != 0

    def __len__(self) -> int:
        return len(self._parts)

    def __iter__(self) -> Iterator[MicroBatch]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, number: int) -> MicroBatch:
        micro = _micro_batch(self._batch, self._mask_T, self._work, self._parts[number])
        if self._column_T is not None:
            micro = replace(micro, column_N=self._column_T[micro.column_N])
        return micro if self._part is None else self._part(micro)

    @property
    def tokens(self) -> list[int]:
        """How many each computes."""
        return [self._work.rows(part) for part in self._parts]

    @property
    def flops(self) -> float:
        """FLOPs of all samples, forward and backward."""
        return sum(self._work.flops(part) for part in self._parts)


@dataclass(frozen=True)
class Packing:
    """How a rank packs what it is given. `share_prompts`: a prompt (the tokens before the first loss token) that
    several sequences of a micro-batch begin with is computed once in it. `size`: of the model; its arithmetic is what
    is even between micro-batches. `rounds`: how many of them all ranks make when this one needs so many. `part`: what
    this rank computes of a micro-batch that it shares. `heaviest`: the most work that any rank has in each round, given
    what this one has; None where ranks do not wait for one another."""

    budget: Budget
    share_prompts: bool = False
    size: DecoderSize | None = None
    rounds: Callable[[int], int] = int
    part: Callable[[MicroBatch], MicroBatch] | None = None
    heaviest: Callable[[Sequence[float]], Sequence[float]] | None = None

    def micro_batches(self, batch: Batch) -> MicroBatches:
        """Split a batch (needs `tokens_T`, `loss_mask_T`): as few micro-batches as fit, or as many as all ranks make
        where there are sequences enough. Those with the same `unit_B`, where there is that column, stay together.

        Only what predicts a loss token is computed: a sequence ends before its last loss token, and one without any is
        left out. Raises BatchError when a whole sequence is over the budget, computed or not.
        """
        self.budget.check(batch["length_B"])
        return self._split(batch, batch, None)

    def last_token_micro_batches(self, batch: Batch) -> MicroBatches:
        """Split a batch (needs `tokens_T`) so that all of it is computed.

        `hidden_N`: the row of each sequence's last token. `column_N`: the sequence's index. Sequences without tokens
        are left out. With `loss_mask_T` they share prompts, and with `unit_B` stay together, as in `micro_batches`.
        Raises BatchError when one is over the budget.
        """
        self.budget.check(batch["length_B"])
        length_B, ends = batch["length_B"].astype(np.int64), batch.offsets[1:]
        has_B = length_B > 0
        # One more token, which nothing computes: what the last one would predict.
        asked = Batch(
            {
                "length_B": length_B + has_B,
                "tokens_T": np.insert(batch["tokens_T"], ends[has_B], 0),
                "loss_mask_T": np.insert(np.zeros(batch.num_tokens, dtype=np.int8), ends[has_B], 1),
                **({"unit_B": batch["unit_B"]} if "unit_B" in batch else {}),
            }
        )
        if "loss_mask_T" not in batch:
            return self._split(asked, asked, asked.sequence_T)
        mask_T = np.insert(batch["loss_mask_T"], ends[has_B], 1)
        return self._split(Batch({**asked.columns, "loss_mask_T": mask_T}), asked, asked.sequence_T)

    def _split(self, measured: Batch, batch: Batch, column_T: NDArray[np.int64] | None) -> MicroBatches:
        """`measured`: the same sequences with a mask that says what is computed, and where prompts end."""
        work = SequenceWork.of(measured, size=self.size, share_prompts=self.share_prompts)
        joined = work.joined(batch["unit_B"]) if "unit_B" in batch else None
        pieces, limit = work if joined is None else joined.work, self.budget.row_tokens
        if joined is not None:
            self.budget.check_units(batch["unit_B"], pieces.rows_B)
        found = fewest_rows(pieces, limit)
        rounds = self.rounds(len(found))
        parts = even_rows(pieces, limit, found, rounds)
        if self.heaviest is not None:
            own = [*(pieces.flops(part) for part in parts), *[0.0] * (rounds - len(parts))]
            parts = in_step(pieces, limit, parts, self.heaviest(own))
        if joined is not None:
            parts = [joined.sequences(part).tolist() for part in parts]
        return MicroBatches(batch, work, parts, rounds, column_T, self.part)


def pack(lengths: Sequence[int], limit: int) -> list[list[int]]:
    """Indices of the sequences of each micro-batch, none over `limit` tokens. Empty sequences are left out. Raises
    BatchError when one is over it."""
    length_B = np.array(lengths, dtype=np.int64)
    Budget(limit).check(length_B)
    return fewest_rows(SequenceWork.apart(length_B, length_B.astype(np.float64)), limit)


class _Segments:
    """The segments of a micro-batch, and for each sequence (M) where its prompt's last row and its own rows are."""

    def __init__(self, work: SequenceWork, pieces: list[list[int]]) -> None:
        self.lengths: list[int] = []
        self.parents: list[int] = []
        self.columns: list[int] = []  # of the first token
        self.positions: list[int] = []  # of the first token
        self.rows = 0
        self.last_prompt_row_M: list[int] = []
        self.own_row_M: list[int] = []
        self.prompt_M: list[int] = []
        for piece in pieces:
            offset = work.offset_B[piece].tolist()
            used = work.rows_B[piece].tolist()
            prompt = int(work.prompt_B[piece[0]]) if len(piece) > 1 else 0
            parent = self._add(prompt, offset[0], 0, -1) if prompt else -1
            last = self.rows - 1
            for start, length in zip(offset, used, strict=True):
                self.prompt_M.append(prompt)
                self.last_prompt_row_M.append(last)
                self.own_row_M.append(self.rows)
                if length > prompt:
                    self._add(length - prompt, start + prompt, prompt, parent)

    def _add(self, length: int, column: int, position: int, parent: int) -> int:
        self.lengths.append(length)
        self.parents.append(parent)
        self.columns.append(column)
        self.positions.append(position)
        self.rows += length
        return len(self.lengths) - 1


def _micro_batch(batch: Batch, mask_T: NDArray[np.bool_], work: SequenceWork, part: Part) -> MicroBatch:
    families: dict[int, list[int]] = {}
    for sequence, family in zip(part, work.family_B[part].tolist(), strict=True):
        families.setdefault(family, []).append(sequence)
    segments = _Segments(work, list(families.values()))
    segment_T, within_T = _count_up(np.array(segments.lengths))
    column_T = within_T + np.array(segments.columns)[segment_T]
    members = [sequence for family in families.values() for sequence in family]
    member_N, within_N = _count_up(work.rows_B[members])
    column_N, position_N = work.offset_B[members][member_N] + within_N + 1, within_N + 1
    chosen = mask_T[column_N]
    column_N, position_N, member_N = column_N[chosen], position_N[chosen], member_N[chosen]
    own_N = position_N - 1 - np.array(segments.prompt_M)[member_N]  # -1: the prompt's last token predicts it
    hidden_N = np.where(
        own_N < 0, np.array(segments.last_prompt_row_M)[member_N], np.array(segments.own_row_M)[member_N] + own_N
    )
    return MicroBatch(
        lengths=segments.lengths,
        parents=segments.parents,
        tokens_T=batch["tokens_T"][column_T].astype(np.int64),
        positions_T=within_T + np.array(segments.positions)[segment_T],
        hidden_N=hidden_N,
        target_N=batch["tokens_T"][column_N].astype(np.int64),
        column_N=column_N,
        sequence_M=np.array(members, dtype=np.int64),
    )


def _count_up(counts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """[2, 3] → ([0, 0, 1, 1, 1], [0, 1, 0, 1, 2])."""
    which = np.repeat(np.arange(len(counts)), counts)
    return which, np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)


def loss_weight_T(batch: Batch, aggregation: str, scale: LossScale) -> NDArray[np.float32]:
    """Weight of each token's loss in the global loss, 0 off the mask; their weighted sum is the loss.

    - token-mean: all loss tokens of the mini-batch count the same (DAPO, Yu et al. 2025).
    - seq-mean-token-mean: the mean over sequences of each one's mean (Shao et al. 2024).
    - seq-mean-token-sum: the mean over sequences of each one's sum.
    - token-sum-constant: the sum over the longest response there could be (Dr.GRPO, Liu et al. 2025).
    """
    mask_T = (batch["loss_mask_T"] != 0).astype(np.float64)
    if aggregation == "token-mean":
        weight_T = mask_T / max(1, scale.num_loss_tokens)
    elif aggregation == "seq-mean-token-sum":
        weight_T = mask_T / max(1, scale.num_sequences)
    elif aggregation == "token-sum-constant":
        weight_T = mask_T / max(1, scale.max_response_tokens * scale.num_sequences)
    else:
        assert aggregation == "seq-mean-token-mean", aggregation
        tokens_T = np.repeat(batch.sum_by_sequence("loss_mask_T"), batch["length_B"])
        weight_T = mask_T / np.maximum(1, tokens_T * scale.num_sequences)
    return np.asarray(weight_T, dtype=np.float32)


def update_counts(batch: Batch, micros: MicroBatches, ranks: int = 1, *, first: bool = True) -> dict[str, float]:
    """Return what `forward_backward` counts: `ENGINE_SUMS` and `ENGINE_MAXIMA`. `micros`: of the `ranks` that compute
    them together; the `first` of these counts them."""
    tokens_B, computed = batch.sum_by_sequence("loss_mask_T"), micros.tokens if first else []
    return {
        "tokens": float(tokens_B.sum()),
        "sequences": float((tokens_B > 0).sum()),
        "micro_batches": float(len(computed)),
        "flops": micros.flops / ranks,
        "micro_batch_tokens_max": float(max(computed, default=0)),
    }


def unit_counts(batch: Batch) -> dict[str, float]:
    """Return the counts of `UNIT_SUMS`; none of a batch without units."""
    if "unit_B" not in batch:
        return {}
    chosen = int((batch["chosen_B"] != 0).sum())
    return {
        "units": float(len(np.unique(batch["unit_B"]))),
        "chosen": float(chosen),
        "rejected": float(len(batch) - chosen),
    }


def by_token(column_B: NDArray[np.float64], batch: Batch) -> NDArray[np.float32]:
    """A sequence's value at each of its tokens."""
    return np.repeat(column_B, batch["length_B"]).astype(np.float32)


def log_ratio_T(batch: Batch, loss: Loss, logprob_T: NDArray[np.float32]) -> NDArray[np.float64]:
    """Current log-prob minus that of the loss's anchor at each loss token, 0 elsewhere."""
    anchor_T = batch[{"trainer": "old_logprob_T", "sampler": "rollout_logprob_T"}[loss.anchor]]
    return np.where(batch["loss_mask_T"] != 0, logprob_T.astype(np.float64) - anchor_T, 0.0)
