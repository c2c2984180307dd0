"""Advantages of single tokens against hand-computed numbers and a slow loop."""

import numpy as np
import pytest

from rlctl.loop.advantages import columns
from rlctl.loop.token_advantages import decayed_sums
from specs.schema.algorithms.algorithm_tables import ReturnToGo
from specs.wire.batch import Batch


def batch_of(*masks):
    length_B = np.array([len(mask) for mask in masks])
    mask_T = np.concatenate([np.array(mask, np.uint8) for mask in masks])
    order_B = np.arange(len(masks))
    identity = {"group_B": order_B, "rollout_B": order_B, "id_B": order_B}
    return Batch({"tokens_T": np.arange(length_B.sum()), "loss_mask_T": mask_T, "length_B": length_B, **identity})


def advantages(table, batch, scores, valid=None, penalty_T=None):
    valid_B = np.ones(len(batch), bool) if valid is None else np.array(valid)
    made = columns(table, batch, np.array(scores, np.float32), valid_B, penalty_T)
    assert list(made) == ["advantage_T"]
    return made["advantage_T"]


def test_return_to_go_by_hand():
    # with γ = 1/2 the returns are 2, 4 (the hole between them is no step) and 1
    got_T = advantages(ReturnToGo(discount=0.5), batch_of([0, 1, 0, 1], [0, 1]), [4.0, 1.0])
    mean, spread = 7 / 3, np.sqrt(((2 - 7 / 3) ** 2 + (4 - 7 / 3) ** 2 + (1 - 7 / 3) ** 2) / 2)
    assert got_T == pytest.approx([0, (2 - mean) / spread, 0, (4 - mean) / spread, 0, (1 - mean) / spread])


def test_penalties_stand_at_their_tokens():
    """Return 4 - 1 at the last token and 4 - 1 - 2 at the first: whitened ±1/√2."""
    penalty_T = np.array([9.0, 2.0, 9.0, 1.0])
    got_T = advantages(ReturnToGo(), batch_of([0, 1, 0, 1]), [4.0], penalty_T=penalty_T)
    assert got_T == pytest.approx([0, -(0.5**0.5), 0, 0.5**0.5])


def test_ungraded_and_empty_samples():
    """A sample whose grading failed moves nothing and learns nothing; one without a loss token is not there."""
    masks = [0, 1, 1], [0, 0], [0, 1]
    without_T = advantages(ReturnToGo(discount=0.9), batch_of(*masks), [1.0, 5.0, 0.0])
    with_T = advantages(ReturnToGo(discount=0.9), batch_of([0, 1, 1], *masks), [99.0, 1.0, 5.0, 0.0], [0, 1, 1, 1])
    assert with_T.tolist() == [0, 0, 0, *without_T.tolist()]
    assert np.abs(without_T[[1, 2, 6]]).min() > 0
    assert advantages(ReturnToGo(), batch_of([0, 1]), [1.0]).tolist() == [0, 0]  # nothing to whiten against
    assert advantages(ReturnToGo(), batch_of([0, 1]), [1.0], [False]).tolist() == [0, 0]


def test_a_shift_of_all_scores_changes_nothing_without_discount():
    rng = np.random.default_rng(1)
    batch = batch_of(*(rng.random(9) < 0.6 for _ in range(20)))
    scores = rng.normal(size=20)
    shifted_T = advantages(ReturnToGo(), batch, scores + 3)
    assert shifted_T == pytest.approx(advantages(ReturnToGo(), batch, scores), abs=1e-5)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 99, 1000])
def test_decayed_sums_against_a_slow_loop(count):
    rng = np.random.default_rng(count)
    value_N, decay_N = rng.normal(size=count), rng.choice([0.0, 0.3, 1.0], size=count)
    expected, behind = [], 0.0
    for value, decay in zip(value_N[::-1], decay_N[::-1], strict=True):
        behind = value + decay * behind
        expected.append(behind)
    assert decayed_sums(value_N, decay_N) == pytest.approx(np.array(expected[::-1]), abs=1e-9)
