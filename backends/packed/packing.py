"""Packs sequences into micro-batches; sequences with a common prompt may share its rows.

No padding: a micro-batch is one row of segments that lie one after another. A segment is a whole sequence, or a prompt
that several sequences begin with, or what one of these adds to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from backends.protocol import LossScale
from specs.errors import BatchError
from specs.schema.algorithms.algorithm import AnyLoss, Loss
from specs.wire.batch import Batch


def pack(lengths: Sequence[int], limit: int) -> list[list[int]]:
    """Indices of the sequences of each micro-batch, none over `limit` tokens (first-fit decreasing).

    First-fit decreasing uses at most 11/9 of the fewest possible bins, plus one (Johnson 1973). Empty sequences
    are left out. Raises BatchError naming the first sequence that is too long by itself.
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = int(lengths[index])
        if length > limit:
            raise BatchError(
                f"sequence {index} has {length} tokens, over the limit of {limit} per micro-batch",
                hint="raise micro_batch_tokens or sequence_parallel of the role, or lower data.max_response_tokens",
            )
        if not length:
            continue
        slot = next((i for i, free in enumerate(room) if free >= length), len(bins))
        if slot == len(bins):
            bins.append([])
            room.append(limit)
        bins[slot].append(index)
        room[slot] -= length
    return bins


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

    @property
    def num_tokens(self) -> int:
        return len(self.tokens_T)


@dataclass(frozen=True)
class _Sequences:
    """Of each sequence of a batch: its first column, how many tokens are computed, and how many of them are prompt."""

    offset_B: NDArray[np.int64]
    used_B: NDArray[np.int64]
    prompt_B: NDArray[np.int64]


def micro_batches(batch: Batch, limit: int, *, share_prompts: bool = False) -> list[MicroBatch]:
    """Cut a batch (needs `tokens_T`, `loss_mask_T`) into micro-batches of at most `limit` tokens.

    Only what predicts a loss token is computed: a sequence ends before its last loss token, and one without any is
    left out. With `share_prompts`, a prompt (the tokens before the first loss token) that several sequences of a
    micro-batch begin with is computed once in it. Raises BatchError when a whole sequence is over the limit, computed
    or not.
    """
    _refuse_too_long(batch, limit)
    return _cut(batch, limit, share_prompts)


def last_token_micro_batches(batch: Batch, limit: int, *, share_prompts: bool = False) -> list[MicroBatch]:
    """Cut a batch (needs `tokens_T`) into micro-batches that compute all of it, of at most `limit` tokens.

    `hidden_N`: the row of each sequence's last token. `column_N`: the sequence's index. Sequences without tokens are
    left out. Raises BatchError when one is over the limit.
    """
    _refuse_too_long(batch, limit)
    length_B, ends = batch["length_B"].astype(np.int64), batch.offsets[1:]
    has_B = length_B > 0
    # One more token, which nothing computes: what the last one would predict.
    asked = Batch(
        {
            "length_B": length_B + has_B,
            "tokens_T": np.insert(batch["tokens_T"], ends[has_B], 0),
            "loss_mask_T": np.insert(np.zeros(batch.num_tokens, dtype=np.int8), ends[has_B], 1),
        }
    )
    last_B = asked.offsets[1:] - 1
    return [
        replace(micro, column_N=np.searchsorted(last_B, micro.column_N)) for micro in _cut(asked, limit, share_prompts)
    ]


def _refuse_too_long(batch: Batch, limit: int) -> None:
    length_B = batch["length_B"]
    if len(batch) and length_B.max() > limit:
        pack(length_B.tolist(), limit)


def _cut(batch: Batch, limit: int, share_prompts: bool) -> list[MicroBatch]:
    offsets, length_B = batch.offsets, batch["length_B"]
    mask_T = batch["loss_mask_T"] != 0
    if mask_T[offsets[:-1][length_B > 0]].any():
        raise BatchError("loss_mask_T marks the first token of a sequence, which no token predicts")
    position_T = np.arange(len(mask_T)) - np.repeat(offsets[:-1], length_B)
    sequence_N, position_N = batch.sequence_T[mask_T], position_T[mask_T]
    used_B = np.zeros(len(batch), dtype=np.int64)
    np.maximum.at(used_B, sequence_N, position_N)
    prompt_B = used_B.copy()
    np.minimum.at(prompt_B, sequence_N, position_N)
    sequences = _Sequences(offsets[:-1], used_B, prompt_B)
    families = _families(batch["tokens_T"], sequences) if share_prompts else [[int(i)] for i in np.flatnonzero(used_B)]
    pieces = [piece for family in families for piece in _pieces(family, sequences, limit)]
    sizes = [_size(piece, sequences) for piece in pieces]
    return [_micro_batch(batch, mask_T, sequences, [pieces[i] for i in chosen]) for chosen in pack(sizes, limit)]


def _families(tokens_T: NDArray[np.int32], sequences: _Sequences) -> list[list[int]]:
    """Sequences by their prompt, those that compute nothing left out."""
    found: dict[bytes, list[int]] = {}
    for i in np.flatnonzero(sequences.used_B):
        start = sequences.offset_B[i]
        found.setdefault(tokens_T[start : start + sequences.prompt_B[i]].tobytes(), []).append(int(i))
    return list(found.values())


def _pieces(family: list[int], sequences: _Sequences, limit: int) -> list[list[int]]:
    """The family, or, where it is over the limit, parts of it that each repeat the prompt."""
    if _size(family, sequences) <= limit:
        return [family]
    prompt = int(sequences.prompt_B[family[0]])
    own = [int(sequences.used_B[i]) - prompt for i in family]
    parts = [[family[i] for i in chosen] for chosen in pack(own, limit - prompt)]
    parts[0] += [i for i, length in zip(family, own, strict=True) if not length]  # these need the prompt only
    return parts


def _size(piece: list[int], sequences: _Sequences) -> int:
    """Tokens that are computed for sequences with the same prompt."""
    return int(sequences.used_B[piece].sum() - (len(piece) - 1) * sequences.prompt_B[piece[0]])


class _Segments:
    """The segments of a micro-batch, and for each sequence (M) where its prompt's last row and its own rows are."""

    def __init__(self, sequences: _Sequences, pieces: list[list[int]]) -> None:
        self.lengths: list[int] = []
        self.parents: list[int] = []
        self.columns: list[int] = []  # of the first token
        self.positions: list[int] = []  # of the first token
        self.rows = 0
        self.last_prompt_row_M: list[int] = []
        self.own_row_M: list[int] = []
        self.prompt_M: list[int] = []
        for piece in pieces:
            offset = sequences.offset_B[piece].tolist()
            used = sequences.used_B[piece].tolist()
            prompt = int(sequences.prompt_B[piece[0]]) if len(piece) > 1 else 0
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


def _micro_batch(batch: Batch, mask_T: NDArray[np.bool_], sequences: _Sequences, pieces: list[list[int]]) -> MicroBatch:
    segments = _Segments(sequences, pieces)
    segment_T, within_T = _count_up(np.array(segments.lengths))
    column_T = within_T + np.array(segments.columns)[segment_T]
    members = [i for piece in pieces for i in piece]
    member_N, within_N = _count_up(sequences.used_B[members])
    column_N, position_N = sequences.offset_B[members][member_N] + within_N + 1, within_N + 1
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
        tokens_T = np.repeat(loss_tokens_B(batch), batch["length_B"])
        weight_T = mask_T / np.maximum(1, tokens_T * scale.num_sequences)
    return np.asarray(weight_T, dtype=np.float32)


def loss_tokens_B(batch: Batch) -> NDArray[np.int64]:
    """Loss tokens of each sequence."""
    counts = np.concatenate([[0], np.cumsum(batch["loss_mask_T"] != 0)])
    return np.asarray(counts[batch.offsets[1:]] - counts[batch.offsets[:-1]], dtype=np.int64)


def update_counts(batch: Batch, micros: Sequence[MicroBatch]) -> dict[str, float]:
    """What `forward_backward` counts of a batch that it cut into `micros`: `ENGINE_SUMS` and `ENGINE_MAXIMA`."""
    tokens_B = loss_tokens_B(batch)
    return {
        "tokens": float(tokens_B.sum()),
        "sequences": float((tokens_B > 0).sum()),
        "micro_batches": float(len(micros)),
        "micro_batch_tokens_max": float(max((micro.num_tokens for micro in micros), default=0)),
    }


def check_update(batch: Batch, loss: AnyLoss) -> None:
    """Raise BatchError unless the batch has every column that `forward_backward` needs."""
    batch.require(loss.columns, "update")


def by_token(column_B: NDArray[np.float64], batch: Batch) -> NDArray[np.float32]:
    """A sequence's value at each of its tokens."""
    return np.repeat(column_B, batch["length_B"]).astype(np.float32)


def log_ratio_T(batch: Batch, loss: Loss, logprob_T: NDArray[np.float32]) -> NDArray[np.float64]:
    """Current log-prob minus that of the loss's anchor at each loss token, 0 elsewhere."""
    anchor_T = batch[{"trainer": "old_logprob_T", "sampler": "rollout_logprob_T"}[loss.anchor]]
    return np.where(batch["loss_mask_T"] != 0, logprob_T.astype(np.float64) - anchor_T, 0.0)
