"""A rollout counts once, however many samples it left."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rlctl.loop.rollouts import GradedGroups, first_valid
from rlctl.loop.sampling import Scored
from rlctl.loop.step_metrics import RankReport, collect
from specs.schema.algorithms.algorithm_tables import PpoClip
from specs.wire.batch import Batch
from specs.wire.bodies import Stepped

ROLLOUT_B = np.array([7, 7, 4, 7, 9])


def test_the_score_of_a_rollout_is_that_of_its_first_valid_sample():
    assert first_valid(ROLLOUT_B, np.array([False, True, True, True, False])).tolist() == [1, 2]
    scored_B = np.array([False, True, True, True, False])
    scored = Scored(np.array([0, 1, 5, 1, 0], dtype=np.float32), scored_B, {}, [])
    assert scored.by_rollout(ROLLOUT_B).tolist() == [1, 5]
    nothing = Scored(np.arange(5, dtype=np.float32), np.zeros(5, bool), {}, [])
    assert nothing.by_rollout(ROLLOUT_B).tolist() == [0, 2, 4], "the fallback of each"


def test_metrics_of_a_step_count_rollouts_and_loss_tokens():
    """Three rollouts; the first has two turns in one sample, with a tool's reply between, the second two samples."""
    masks = [[0, 1, 1, 0, 0, 1], [0, 1, 1, 1, 1], [0, 0, 0, 1], [0, 1, 1]]
    columns = {
        "length_B": np.array([len(mask) for mask in masks]),
        "loss_mask_T": np.concatenate(masks).astype(np.uint8),
        "tokens_T": np.array([1, 5, 5, 9, 9, 5, 1, 5, 5, 9, 5, 1, 1, 1, 5, 2, 5, 5]),
        "rollout_B": np.array([5, 3, 3, 8]),
        "group_B": np.array([0, 0, 0, 1]),
        "finished_B": np.array([1, 1, 0, 1], dtype=np.uint8),
    }
    scored = Scored(np.array([1, 4, 4, 1], dtype=np.float32), np.ones(4, dtype=bool), {}, [])
    sums = dict.fromkeys(
        ("loss", "micro_batches", "entropy", "kl", "clipped", "approx_kl", "ratio", "logprob_gap"), 0.0
    ) | {"tokens": 10.0, "logprob_gap_max": 0.0, "micro_batch_tokens_max": 0.0}
    loss = PpoClip(anchor="current")
    report = RankReport(sums, Stepped(grad_norm=0.0, lr=0.0, skipped=False, peak_GiB=0.0))
    metrics = collect(1, Batch(columns), scored, {"actor": loss}, {"actor": [[report]]}, None, {"time/step_s": 2.0})
    assert metrics["rollout/length_mean"] == pytest.approx((3 + (4 + 1) + 2) / 3)
    assert metrics["rollout/length_max"] == 5
    assert metrics["rollout/tokens"] == 10
    assert metrics["rollout/repeated"] == 0
    equal = {name: np.tile(column, 2) for name, column in columns.items()}
    equal["rollout_B"] = np.array([5, 3, 3, 8, 15, 13, 13, 18])
    twice = replace(scored, reward_B=np.tile(scored.reward_B, 2), scored_B=np.ones(8, bool))
    doubled = collect(1, Batch(equal), twice, {"actor": loss}, {"actor": [[report]]}, None, {"time/step_s": 2.0})
    assert doubled["rollout/repeated"] == 0.5
    equal["loss_mask_T"][[-1, -2, -4]] = 0  # samples of which nothing is learned from, such as titles
    titled = collect(1, Batch(equal), twice, {"actor": loss}, {"actor": [[report]]}, None, {"time/step_s": 2.0})
    assert titled["rollout/repeated"] == pytest.approx(1 / 6), "one of a group is as another"
    assert metrics["rollout/finished"] == pytest.approx(2 / 3)
    assert metrics["reward/mean"] == pytest.approx((1 + 4 + 1) / 3)
    assert metrics["reward/std"] == pytest.approx(np.std([1, 4, 1]))
    assert metrics["reward/silent_groups"] == 0.5
    assert "reward/lone_groups" not in metrics, "nothing is compared"


def test_groups_by_what_could_be_graded():
    """Of group 9 one rollout of two was graded, of group 4 none; in group 6 two score the same and a third is not
    graded; group 2 has a rollout of two samples and another."""
    group_B, rollout_B = np.array([9, 9, 4, 6, 6, 6, 2, 2, 2]), np.array([0, 1, 2, 3, 4, 5, 6, 6, 7])
    score_B = np.array([1, 0, 0, 3, 3, 0, 5, 5, 4], dtype=np.float32)
    valid_B = np.array([1, 0, 0, 1, 1, 0, 1, 1, 1], dtype=bool)
    groups = GradedGroups.of(group_B, rollout_B, score_B, valid_B)
    assert groups.group_G.tolist() == [2, 4, 6, 9]
    assert groups.rollouts_G.tolist() == [2, 0, 2, 1]
    assert groups.differ_G.tolist() == [True, False, False, False]
