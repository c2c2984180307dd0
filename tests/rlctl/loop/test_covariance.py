"""Which tokens the losses of the entropy mechanism choose, against slow loops and hand numbers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from told_actor import RANKS, drawn, driver_of

from rlctl.loop.covariance import covariances, with_selection
from specs.schema.algorithms.algorithm_tables import ClipCovLoss, KlCovLoss
from specs.wire.batch import Batch


def mini_of(logprob: list[float], advantage: list[float], mask: list[int] | None = None) -> Batch:
    """One sequence; the sampler's log-probs are those of the trainer turned round."""
    mask_T = np.array(mask or [1] * len(logprob), dtype=np.uint8)
    return Batch(
        {
            "length_B": np.array([len(logprob)]),
            "tokens_T": np.arange(len(logprob), dtype=np.int32),
            "loss_mask_T": mask_T,
            "advantage_T": np.array(advantage, dtype=np.float32),
            "old_logprob_T": np.array(logprob, dtype=np.float32),
            "rollout_logprob_T": np.array(logprob[::-1], dtype=np.float32),
        }
    )


def chosen(loss: Any, mini: Batch, seed: int = 0) -> list[int]:
    return np.flatnonzero(with_selection(loss, mini, (seed,))["covariant_T"]).tolist()


def test_covariances_by_hand_and_by_a_slow_loop() -> None:
    """Log-probs -1, -3 and advantages 1, -1: both deviations are ±1, so both tokens have covariance 1."""
    assert covariances(np.array([-1.0, -3.0]), np.array([1.0, -1.0])).tolist() == [1.0, 1.0]
    rng = np.random.default_rng(0)
    logprob, advantage = rng.normal(-2, 1, 50), rng.normal(size=50)
    of_logprob, of_advantage = (math.fsum(column) / 50 for column in (logprob, advantage))
    slow = [(lp - of_logprob) * (a - of_advantage) for lp, a in zip(logprob, advantage, strict=True)]
    found = covariances(logprob, advantage)
    assert found.tolist() == pytest.approx(slow)
    assert found.mean() == pytest.approx(np.cov(logprob, advantage, bias=True)[0, 1])


def test_the_largest_are_chosen() -> None:
    """Deviations of log-probs are 3, -1, -1, -1 and of advantages 3, -1, -3, 1: covariances 9, 1, 3, -1. Half of four
    are the first and the third. Masked tokens have none, and are in no mean."""
    logprob, advantage = [-1.0, -5.0, -5.0, -5.0], [3.0, -1.0, -3.0, 1.0]
    loss = KlCovLoss(anchor="trainer", covariance_share=0.5)
    assert chosen(loss, mini_of(logprob, advantage)) == [0, 2]
    assert chosen(loss, mini_of([90.0, *logprob], [90.0, *advantage], [0, 1, 1, 1, 1])) == [1, 3]
    assert chosen(KlCovLoss(anchor="trainer", covariance_share=0.3), mini_of(logprob, advantage)) == [0]
    assert chosen(KlCovLoss(anchor="trainer", covariance_share=1e-6), mini_of(logprob, advantage)) == [0]


def test_tokens_in_the_band_are_drawn() -> None:
    """As many as the share, from the band alone, evenly; the same for the same seed."""
    rng = np.random.default_rng(0)
    logprob, advantage = rng.normal(-2, 1, 1000), rng.normal(size=1000)
    mini, covariance_N = mini_of(list(logprob), list(advantage)), covariances(logprob, advantage)
    loss = ClipCovLoss(anchor="trainer", covariance_share=0.02, covariance_low=0.5, covariance_high=2.0)
    band = set(np.flatnonzero((covariance_N >= 0.5) & (covariance_N <= 2.0)).tolist())
    draws = [chosen(loss, mini, seed) for seed in range(200)]
    assert all(len(draw) == 20 and set(draw) <= band for draw in draws)
    assert chosen(loss, mini, 3) == draws[3] != draws[4]
    counts = np.bincount(np.concatenate(draws), minlength=1000)[sorted(band)]
    assert abs(counts - 4000 / len(band)).max() < 6 * math.sqrt(4000 / len(band))
    none = ClipCovLoss(anchor="trainer", covariance_low=90.0, covariance_high=91.0)
    assert chosen(none, mini) == []
    few = ClipCovLoss(anchor="trainer", covariance_share=0.9, covariance_low=0.5, covariance_high=2.0)
    assert set(chosen(few, mini)) == band


def test_ranks_and_mini_batches_learn_from_one_choice(tmp_path: Path) -> None:
    """It is made of each mini-batch as a whole, whose shares the ranks get."""
    options = ("kind=kl_cov", "covariance_share=0.3", "mini_batches_per_step=2")
    driver, actor = driver_of(tmp_path, *(f"algorithm.{key}" for key in options))
    batch, scored = drawn()
    old_T = np.random.default_rng(1).normal(-2, 0.5, batch.num_tokens).astype(np.float32)
    batch = Batch({**batch.columns, "old_logprob_T": old_T, "rollout_logprob_T": old_T})
    driver.update(driver.add_advantages(batch, scored), 1)
    for shares in zip(*actor.told, strict=True):
        parts = [share for share, _ in shares]
        assert len(parts) == RANKS
        whole = {
            name: np.concatenate([part[name][part["loss_mask_T"] > 0] for part in parts])
            for name in ("old_logprob_T", "advantage_T", "covariant_T")
        }
        covariance_N = covariances(whole["old_logprob_T"], whole["advantage_T"])
        count = int(0.3 * len(covariance_N))
        assert whole["covariant_T"].sum() == count
        smallest_chosen = covariance_N[whole["covariant_T"] > 0].min()
        assert (covariance_N > smallest_chosen + 1e-9).sum() < count
        assert all(part["covariant_T"][part["loss_mask_T"] == 0].sum() == 0 for part in parts)
