"""How a step's numbers are reduced, against numbers by hand."""

import math

import numpy as np
import pytest

from rlctl.loop.sampling import Scored
from rlctl.loop.step_metrics import RankReport, _imbalance, collect, idle_s, of_loss, update_metrics
from specs.schema.algorithms.algorithm_tables import PpoClip
from specs.schema.objectives import Kto
from specs.schema.rewards import MAX_SCORE
from specs.wire.batch import Batch
from specs.wire.bodies import Stepped

STEPPED = Stepped(grad_norm=1.0, lr=0.1, skipped=False, peak_GiB=0.0)
LOSS = PpoClip(anchor="current")


def report(tokens, entropy, loss, norm, gap, skipped=False):
    names = ("kl", "clipped", "logprob_gap", "approx_kl", "ratio")
    sums = {"tokens": tokens, "entropy": entropy, "loss": loss, "micro_batches": 1, **dict.fromkeys(names, 0.0)}
    sums |= {"logprob_gap_max": gap, "micro_batch_tokens_max": 10 * gap}
    return RankReport(sums, Stepped(grad_norm=norm, lr=0.1, skipped=skipped, peak_GiB=norm / 2))


def test_ranks_and_updates_of_unequal_size_are_weighed_by_their_tokens():
    # two optimizer steps on two ranks; a mean of means would give (1 + 4 + 2 + 2) / 4
    updates = [
        [report(1, 1.0, 0.2, 3.0, 0.5), report(3, 12.0, 0.4, 3.0, 0.1)],
        [report(2, 4.0, 0.1, 5.0, 0.2), report(2, 4.0, 0.3, 5.0, 0.2, skipped=True)],
    ]
    metrics = update_metrics("actor", LOSS, updates)
    assert metrics["actor/entropy"] == pytest.approx((1 + 12 + 4 + 4) / 8)
    assert metrics["actor/loss"] == pytest.approx(((0.2 + 0.4) + (0.1 + 0.3)) / 2)
    assert metrics["actor/grad_norm"] == pytest.approx(4.0)
    assert metrics["rollout/logprob_gap_max"] == 0.5
    assert metrics["actor/skipped_updates"] == 0
    assert metrics["mem/actor_peak_GiB"] == 2.5


def test_against_the_sampler_the_gap_is_that_of_the_first_update():
    """Those after it also hold what the step has learned."""
    updates = [[report(2, 4.0, 0.1, 5.0, 0.2)], [report(2, 2.0, 0.2, 3.0, 0.5)]]
    gap, entropy = "rollout/logprob_gap_max", "actor/entropy"
    sampler = update_metrics("actor", PpoClip(anchor="sampler"), updates)
    assert (sampler[gap], sampler[entropy]) == (0.2, 1.5)
    assert update_metrics("actor", LOSS, updates)[gap] == 0.5


def test_imbalance_is_of_the_rank_with_most_work_in_each_update() -> None:
    def role(*flops_of_updates):
        return [[RankReport({"flops": flops}, STEPPED) for flops in ranks] for ranks in flops_of_updates]

    # (6 + 5) against the averages 4 and 5; a mean of ratios would be 1.25, and the ranks' totals are 8 and 10
    assert _imbalance([role((2.0, 6.0), (5.0, 5.0))]) == {"perf/imbalance": pytest.approx(11 / 9)}
    assert _imbalance([role((2.0, 6.0)), role((1.0, 1.0))]) == {"perf/imbalance": 1.5}, "of the role where it is most"
    assert _imbalance([role((2.0,))]) == {}, "a rank alone"
    assert _imbalance([role((0.0, 0.0))]) == {}
    assert _imbalance([[[RankReport({}, STEPPED)] * 2]]) == {}, "an engine that does not count"


def test_idle_time_is_what_no_rank_worked_in():
    assert idle_s([], 0.0, 2.0) == 2.0
    assert idle_s([(1.0, 3.0), (2.0, 4.0), (6.0, 7.0)], 0.0, 10.0) == pytest.approx(1 + 2 + 3)
    assert idle_s([(-1.0, 0.5), (9.0, 12.0)], 0.0, 10.0) == pytest.approx(8.5)


def test_a_norm_that_is_not_finite_is_counted_and_not_averaged():
    updates = [[report(1, 1.0, 0.2, math.inf, 0.5, skipped=True)], [report(1, 1.0, 0.2, 3.0, 0.5)]]
    metrics = update_metrics("actor", LOSS, updates)
    assert metrics["actor/grad_norm"] == 3.0
    assert metrics["actor/skipped_updates"] == 1
    assert "actor/grad_norm" not in update_metrics("actor", LOSS, updates[:1])


def test_a_mean_over_no_sequence_is_left_out() -> None:
    sums = {"tokens": 4.0, "units": 2.0, "chosen": 2.0, "rejected": 0.0, "chosen_reward": 3.0, "rejected_reward": 0.0}
    sums |= dict.fromkeys(("loss", "entropy", "correct"), 0.0)
    found = of_loss(Kto(kind="kto"), [sums])
    assert found["actor/chosen_reward"] == 1.5
    assert found["actor/loss"] == 0.0
    assert "actor/rejected_reward" not in found


def test_statistics_of_the_largest_scores_are_finite():
    """In float32 their squares, summed, are not."""
    columns = {"tokens_T": np.zeros(512, np.int64), "loss_mask_T": np.ones(512, np.uint8)}
    columns |= {name: np.arange(512) for name in ("group_B", "rollout_B", "id_B")}
    batch = Batch(columns | {"length_B": np.ones(512, np.int64), "finished_B": np.ones(512, np.uint8)})
    reward_B = np.where(np.arange(512) % 2, MAX_SCORE, -MAX_SCORE).astype(np.float32)
    scored = Scored(reward_B, np.ones(512, bool), {}, [])
    updates = [[report(1, 1.0, 0.2, 3.0, 0.5)]]
    metrics = collect(1, batch, scored, {"actor": LOSS}, {"actor": updates}, None, {"time/step_s": 1.0})
    assert metrics["reward/std"] == pytest.approx(MAX_SCORE)
    assert metrics["reward/mean"] == pytest.approx(0.0)
