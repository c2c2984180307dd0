"""What an evaluation says, against numbers by hand."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from rlctl.loop.sampling import Drawn, Scored
from rlctl.loop.scores import eval_metrics
from specs.schema.eval_sets import PassThreshold
from specs.wire.batch import Batch

REWARDS = [[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.1, 0.1], [0.1, 0.1, 0.1, 0.1]]  # three prompts, four completions each


def drawn(*, failed: int | None = None) -> Drawn:
    reward_B = np.array(REWARDS, dtype=np.float32).ravel()
    ids = np.arange(len(reward_B))
    batch = Batch(
        {
            "tokens_T": np.zeros(2 * len(ids), dtype=np.int64),
            "loss_mask_T": np.tile([0, 1], len(ids)).astype(np.uint8),
            "length_B": np.full(len(ids), 2),
            "finished_B": (ids % 2).astype(np.uint8),
            "group_B": ids // 4,
            "rollout_B": ids,
            "id_B": ids,
        }
    )
    scored_B = np.array([index != failed for index in ids])
    term_B = {"term_0_B": (reward_B == 1).astype(np.float32), "term_1_B": np.full(len(ids), 0.1, dtype=np.float32)}
    return Drawn(batch, Scored(reward_B, scored_B, {"timeout": failed is not None}, [], term_B=term_B))


def by_enumeration(n: int, c: int, k: int) -> float:
    """Share of all choices of k among n completions, of which the first c passed, that hold one that passed."""
    choices = list(itertools.combinations(range(n), k))
    return sum(min(choice) < c for choice in choices) / len(choices)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 1, 2), (5, 2, 3), (8, 0, 4), (8, 8, 1), (8, 3, 8), (6, 1, 5)])
def test_the_estimate_is_that_of_all_choices(n: int, c: int, k: int) -> None:
    assert eval_metrics.chance_of_one(n, c, k) == pytest.approx(by_enumeration(n, c, k), abs=1e-12)


def test_by_hand() -> None:
    """1, 2 and 0 of 4 pass. pass@2: 1 - 3/6, 1 - 1/6, 0."""
    found = eval_metrics.evaluated(drawn(), PassThreshold(0, 1.0))
    assert found["pass@1"] == pytest.approx((1 / 4 + 2 / 4 + 0) / 3)
    assert found["pass@2"] == pytest.approx((1 / 2 + 5 / 6 + 0) / 3)
    assert found["pass@4"] == pytest.approx(2 / 3)
    assert found["reward_mean"] == pytest.approx((1.0 + 2.2 + 0.4) / 12)
    means = np.array([0.25, 0.55, 0.1])
    assert found["reward_stderr"] == pytest.approx(means.std(ddof=1) / np.sqrt(3))
    assert (found["term_0"], found["finished"], found["length_mean"]) == (pytest.approx(0.25), 0.5, 1)


def test_the_weighted_sum_passes_from_a_score_on() -> None:
    assert eval_metrics.evaluated(drawn(), PassThreshold(None, 0.1))["pass@1"] == pytest.approx((1 / 4 + 1 + 1) / 3)


def test_what_could_not_be_graded_does_not_pass_and_has_no_reward() -> None:
    found = eval_metrics.evaluated(drawn(failed=0), PassThreshold(0, 1.0))
    assert found["pass@4"] == pytest.approx(1 / 3)
    assert found["reward_mean"] == pytest.approx((0.0 + 2.2 + 0.4) / 11)
    means = np.array([0.0, 0.55, 0.1])
    assert found["reward_stderr"] == pytest.approx(means.std(ddof=1) / np.sqrt(3))
