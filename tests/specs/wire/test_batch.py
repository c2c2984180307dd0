"""Flat batches against the obvious loop."""

import numpy as np
import pytest

from specs.errors import BatchError
from specs.wire.batch import Batch


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
