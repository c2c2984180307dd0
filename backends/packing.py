"""Which sequences share a micro-batch. No padding: sequences of a micro-batch lie one after another in one row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from backends.protocol import LossScale
from specs.batch import Batch
from specs.errors import BatchError
from specs.schema import Grpo


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
                hint="raise micro_batch_tokens of the role, or lower data.max_response_tokens",
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
    """Sequences packed in a row. T: tokens that are computed; N: loss tokens, in the order of the row."""

    lengths: list[int]
    tokens_T: NDArray[np.int64]
    positions_T: NDArray[np.int64]  # restart at 0 with each sequence
    hidden_N: NDArray[np.int64]  # row that predicts each loss token: the one before it
    target_N: NDArray[np.int64]  # the loss token itself
    column_N: NDArray[np.int64]  # where it stands in the batch's `_T` columns

    @property
    def num_tokens(self) -> int:
        return len(self.tokens_T)


def micro_batches(batch: Batch, limit: int) -> list[MicroBatch]:
    """Cut a batch (needs `tokens_T`, `loss_mask_T`) into micro-batches of at most `limit` tokens.

    Only what predicts a loss token is computed: a sequence ends before its last loss token, and one without any is
    left out. Raises BatchError when a whole sequence is over the limit, computed or not.
    """
    offsets, length_B = batch.offsets, batch["length_B"]
    if len(batch) and length_B.max() > limit:
        pack(length_B.tolist(), limit)
    mask_T = batch["loss_mask_T"] != 0
    if mask_T[offsets[:-1][length_B > 0]].any():
        raise BatchError("loss_mask_T marks the first token of a sequence, which nothing predicts")
    position_T = np.arange(len(mask_T)) - np.repeat(offsets[:-1], length_B)
    used_B = np.zeros(len(batch), dtype=np.int64)
    np.maximum.at(used_B, np.repeat(np.arange(len(batch)), length_B)[mask_T], position_T[mask_T])
    return [_micro_batch(batch, mask_T, offsets, used_B, chosen) for chosen in pack(used_B.tolist(), limit)]


def _micro_batch(
    batch: Batch, mask_T: NDArray[np.bool_], offsets: NDArray[np.int64], used_B: NDArray[np.int64], chosen: list[int]
) -> MicroBatch:
    length_B = used_B[chosen]
    ends = np.cumsum(length_B)
    positions_T = np.arange(ends[-1]) - np.repeat(ends - length_B, length_B)
    column_T = positions_T + np.repeat(offsets[chosen], length_B)
    hidden_N = np.flatnonzero(mask_T[column_T + 1])
    column_N = column_T[hidden_N] + 1
    return MicroBatch(
        lengths=length_B.tolist(),
        tokens_T=batch["tokens_T"][column_T].astype(np.int64),
        positions_T=positions_T,
        hidden_N=hidden_N,
        target_N=batch["tokens_T"][column_N].astype(np.int64),
        column_N=column_N,
    )


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
    return weight_T.astype(np.float32)


def loss_tokens_B(batch: Batch) -> NDArray[np.int64]:
    """Loss tokens of each sequence."""
    counts = np.concatenate([[0], np.cumsum(batch["loss_mask_T"] != 0)])
    return (counts[batch.offsets[1:]] - counts[batch.offsets[:-1]]).astype(np.int64)


def check_update(batch: Batch, algorithm: Grpo) -> None:
    """Raise BatchError unless the batch has every column that `forward_backward` needs."""
    needs = ["tokens_T", "loss_mask_T", "advantage_T", "rollout_logprob_T"]
    if algorithm.kl_coef > 0:
        needs.append("ref_logprob_T")
    batch.require(needs, "update")
