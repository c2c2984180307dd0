"""What each rank of a sequence group computes of a packed row."""

from __future__ import annotations

import numpy as np
import pytest
from train_helpers import make_batch, make_grouped_batch

from backends.packed.packing import Budget, MicroBatches, Packing
from backends.ulysses.sequence_group import SequenceGroup
from specs.wire.batch import Batch


def micro_batches(batch: Batch, limit: int, *, share_prompts: bool = False) -> MicroBatches:
    return Packing(Budget(limit), share_prompts).micro_batches(batch)


def groups(size: int) -> list[SequenceGroup]:
    return [SequenceGroup(None, size, rank) for rank in range(size)]


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("batch", [make_batch(), make_grouped_batch()], ids=["ragged", "grouped"])
def test_every_loss_token_is_predicted_by_one_rank(batch: Batch, size: int) -> None:
    for micro in micro_batches(batch, 48, share_prompts=True):
        parts = [micro.part_of(group) for group in groups(size)]
        columns, predicting = [], []
        for group, part in zip(groups(size), parts, strict=True):
            assert part.num_tokens % size == 0
            assert sum(part.lengths) == part.num_tokens
            own = group.own_rows(part.num_tokens)[part.hidden_N]  # rows of the whole row
            predicting += list(zip(part.column_N.tolist(), own.tolist(), part.target_N.tolist(), strict=True))
            columns += part.column_N.tolist()
        assert sorted(columns) == sorted(micro.column_N.tolist())
        whole = zip(micro.column_N.tolist(), micro.hidden_N.tolist(), micro.target_N.tolist(), strict=True)
        assert sorted(predicting) == sorted(whole)


def test_what_a_row_lacks_is_a_segment_of_its_own() -> None:
    (micro,) = micro_batches(Batch({**_one(5)}), 64)
    part = micro.part_of(SequenceGroup(None, 4, 3))
    assert (micro.lengths, part.lengths, part.parents) == ([4], [4], [-1])
    (micro,) = micro_batches(Batch({**_one(6)}), 64)
    part = micro.part_of(SequenceGroup(None, 4, 3))
    assert (micro.lengths, part.lengths, part.parents) == ([5], [5, 3], [-1, -1])
    assert part.positions_T.tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert len(part.hidden_N) == 0, "its rows are filling alone"


def _one(tokens: int) -> dict[str, np.ndarray]:
    """One sequence whose every token but the first is a loss token."""
    mask_T = np.ones(tokens, dtype=np.int8)
    mask_T[0] = 0
    return {"length_B": np.array([tokens]), "tokens_T": np.arange(tokens, dtype=np.int32), "loss_mask_T": mask_T}
