"""Packing: nothing lost, nothing over the budget, nothing computed that no loss token needs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from train_helpers import make_batch

from backends.packing import micro_batches, pack
from specs.batch import Batch
from specs.errors import BatchError


@given(st.lists(st.integers(0, 50), max_size=60), st.integers(50, 120))
def test_pack_keeps_every_sequence_within_the_limit(lengths: list[int], limit: int) -> None:
    bins = pack(lengths, limit)
    assert sorted(index for chosen in bins for index in chosen) == [i for i, length in enumerate(lengths) if length]
    assert all(sum(lengths[i] for i in chosen) <= limit for chosen in bins)
    # first-fit: any two bins together are over the limit
    fills = sorted(sum(lengths[i] for i in chosen) for chosen in bins)
    assert len(fills) < 2 or fills[0] + fills[1] > limit


def test_a_sequence_over_the_limit_is_an_error() -> None:
    with pytest.raises(BatchError, match="sequence 1 has 9 tokens, over the limit of 8"):
        pack([3, 9, 2], 8)


def test_micro_batches_point_at_the_right_tokens() -> None:
    batch = make_batch(30, seed=5)
    offsets = batch.offsets
    seen = []
    for micro in micro_batches(batch, 40):
        assert micro.num_tokens == sum(micro.lengths) <= 40
        starts = np.cumsum([0, *micro.lengths[:-1]])
        assert (micro.positions_T[starts] == 0).all()
        for hidden, target, column in zip(micro.hidden_N, micro.target_N, micro.column_N, strict=True):
            sequence = int(np.searchsorted(offsets, column, side="right") - 1)
            assert batch["tokens_T"][column] == target
            assert micro.positions_T[hidden] == column - offsets[sequence] - 1
            start = hidden - micro.positions_T[hidden]
            context = micro.tokens_T[start : hidden + 1]
            assert (context == batch["tokens_T"][offsets[sequence] : column]).all()
        seen += micro.column_N.tolist()
    assert sorted(seen) == np.flatnonzero(batch["loss_mask_T"]).tolist()


def test_what_no_loss_token_needs_is_not_computed() -> None:
    batch = Batch(
        {
            "length_B": np.array([5, 4]),
            "tokens_T": np.arange(9, dtype=np.int32),
            "loss_mask_T": np.array([0, 1, 1, 0, 0, 0, 0, 0, 0], dtype=np.int8),
        }
    )
    (micro,) = micro_batches(batch, 100)
    assert micro.tokens_T.tolist() == [0, 1]
    assert micro.target_N.tolist() == [1, 2]


def test_the_first_token_cannot_be_learned() -> None:
    batch = Batch({"length_B": np.array([2]), "tokens_T": np.array([1, 2]), "loss_mask_T": np.array([1, 1])})
    with pytest.raises(BatchError, match="first token"):
        micro_batches(batch, 10)
