"""Flat batches against the obvious loop."""

import numpy as np
import pytest

from specs.errors import BatchError
from specs.wire.batch import Batch, balanced_shards, shares_of_ranks


def batch(lengths=(3, 1, 4, 2)):
    total = sum(lengths)
    return Batch(
        {
            "tokens_T": np.arange(total),
            "loss_mask_T": np.arange(total) % 2,
            "id_B": np.arange(len(lengths)) * 10,
            "length_B": np.array(lengths),
        }
    )


@pytest.mark.parametrize("chosen", [[2, 0], [1, 1, 3], [], [0, 1, 2, 3]])
def test_select(chosen):
    source = batch()
    picked = source.select(chosen)
    rows = source.sequences("tokens_T")
    assert picked["tokens_T"].tolist() == [token for i in chosen for token in rows[i]]
    assert picked["id_B"].tolist() == [i * 10 for i in chosen]
    assert picked["length_B"].tolist() == [len(rows[i]) for i in chosen]


def test_sum_by_sequence():
    source = batch()
    assert source.sum_by_sequence("loss_mask_T").tolist() == [int(row.sum()) for row in source.sequences("loss_mask_T")]


def test_concat_undoes_select():
    source = batch()
    again = Batch.concat([source.select([0, 1]), source.select([2, 3])])
    assert again["tokens_T"].tolist() == source["tokens_T"].tolist()
    with pytest.raises(BatchError, match="differ in columns"):
        Batch.concat([source, source.only(["tokens_T"])])


def test_columns_must_fit_and_are_only_gained():
    with pytest.raises(BatchError, match=r"reward_B has shape \(3,\)"):
        batch().with_columns(reward_B=np.zeros(3))
    with pytest.raises(BatchError, match="already has id_B"):
        batch().with_columns(id_B=np.zeros(4))
    with pytest.raises(BatchError, match="must end in _T"):
        batch().with_columns(reward=np.zeros(4))
    with pytest.raises(BatchError, match="update needs the columns advantage_T"):
        batch().require(["tokens_T", "advantage_T"], "update")


@pytest.mark.parametrize("shards", [1, 2, 3, 7])
def test_shards_hold_everything_once_and_evenly(shards):
    length_B = np.random.default_rng(0).integers(1, 100, 50)
    parts = balanced_shards(length_B, shards)
    assert sorted(np.concatenate(parts).tolist()) == list(range(50))
    loads = [int(length_B[part].sum()) for part in parts]
    assert max(loads) - min(loads) <= 100
    assert all(part.tolist() == sorted(part.tolist()) for part in parts)


def test_groups_stay_whole_where_that_is_even_enough():
    length_B, group_B = np.full(48, 10), np.repeat(np.arange(12), 4)
    parts = balanced_shards(length_B, 3, group_B)
    assert [len(part) for part in parts] == [16, 16, 16]
    assert all(len(set(group_B[part].tolist())) == 4 for part in parts)
    uneven = balanced_shards(np.array([10, 10, 10, 100, 100]), 2, np.array([1, 1, 1, 2, 2]))  # 30 against 200
    assert [int(np.array([10, 10, 10, 100, 100])[part].sum()) for part in uneven] == [120, 110]


def test_work_is_balanced_over_ranks_that_share_it() -> None:
    """Eight ranks in groups of two, four samples: each group has one, though half of the ranks have none."""
    parts = shares_of_ranks(np.array([40, 30, 20, 10]), 8, 2, np.array([0, 0, 1, 1]))
    assert [part.tolist() for part in parts] == [[0], [], [1], [], [2], [], [3], []]
    length_B = np.random.default_rng(0).integers(1, 100, 24)
    for degree in (1, 2, 4):
        parts = shares_of_ranks(length_B, 4, degree, np.arange(24) // 6)
        assert sorted(i for part in parts for i in part) == list(range(24))
        groups = [np.sort(np.concatenate(parts[first : first + degree])) for first in range(0, 4, degree)]
        wanted = balanced_shards(length_B, 4 // degree, np.arange(24) // 6)
        assert [group.tolist() for group in groups] == [shard.tolist() for shard in wanted]
