"""The driver's small pure pieces: who gets which samples."""

import numpy as np
import pytest

from rlctl.loop.sampling import group_shards, in_id_order
from rlctl.recipes.rl import mini_batches
from specs.wire.batch import Batch


@pytest.mark.parametrize(("groups", "size", "pieces"), [(8, 4, 2), (8, 4, 4), (6, 4, 8), (5, 3, 5)])
def test_mini_batches_cover_every_sample_once_in_equal_pieces(groups, size, pieces):
    group_B = np.repeat(np.arange(groups) * 7, size)
    parts = mini_batches(group_B, pieces, (0, 1, 0))
    assert sorted(np.concatenate(parts).tolist()) == list(range(groups * size))
    assert {len(part) for part in parts} == {groups * size // pieces}
    if size % pieces == 0:
        for part in parts:
            assert np.unique(group_B[part], return_counts=True)[1].tolist() == [size // pieces] * groups


def test_mini_batches_differ_between_steps_and_repeat_within_one():
    group_B = np.repeat(np.arange(16), 2)
    first, again, other = (mini_batches(group_B, 4, (0, step, 0)) for step in (1, 1, 2))
    assert all((a == b).all() for a, b in zip(first, again, strict=True))
    assert any((a != b).any() for a, b in zip(first, other, strict=True))


def test_whole_groups_to_each_replica():
    group_B = np.array([5, 5, 9, 9, 11, 11])
    shards = group_shards(group_B, 2)
    assert [group_B[shard].tolist() for shard in shards] == [[5, 5, 11, 11], [9, 9]]


def test_order_of_ids():
    batch = Batch({"tokens_T": np.array([1, 2, 3]), "id_B": np.array([8, 3]), "length_B": np.array([2, 1])})
    assert in_id_order(batch)["tokens_T"].tolist() == [3, 1, 2]
