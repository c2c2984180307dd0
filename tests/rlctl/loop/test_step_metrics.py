"""How a step's numbers are reduced, against numbers by hand."""

import pytest

from rlctl.loop.step_metrics import RankReport, idle_s, update_metrics
from specs.schema.algorithms.algorithm_tables import PpoClip
from specs.wire.bodies import Stepped

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
    metrics = update_metrics(LOSS, updates, updates)
    assert metrics["actor/entropy"] == pytest.approx((1 + 12 + 4 + 4) / 8)
    assert metrics["actor/loss"] == pytest.approx(((0.2 + 0.4) + (0.1 + 0.3)) / 2)
    assert metrics["actor/grad_norm"] == pytest.approx(4.0)
    assert metrics["rollout/logprob_gap_max"] == 0.5
    assert metrics["perf/micro_batches"] == 4
    assert metrics["actor/skipped_updates"] == 0
    assert metrics["mem/actor_peak_GiB"] == 2.5


def test_idle_time_is_what_no_rank_worked_in():
    assert idle_s([], 0.0, 2.0) == 2.0
    assert idle_s([(1.0, 3.0), (2.0, 4.0), (6.0, 7.0)], 0.0, 10.0) == pytest.approx(1 + 2 + 3)
    assert idle_s([(-1.0, 0.5), (9.0, 12.0)], 0.0, 10.0) == pytest.approx(8.5)
