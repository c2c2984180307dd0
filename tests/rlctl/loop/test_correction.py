"""Off-policy weights and their diagnostics, against numbers worked out by hand and slow loops."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from local_group import LocalGroup
from running import preset
from told_actor import drawn, driver_of, rl_driver

from rlctl.loop import finite_check
from rlctl.loop.correction import correct, diagnostics, without_non_numbers
from rlctl.loop.logprob_gap import GapLimits, gap_limits
from specs.errors import LogprobGapError, NotFiniteError
from specs.load.load import load_spec
from specs.schema.algorithms.algorithm import Correction
from specs.wire.batch import Batch
from specs.wire.messages import Verb

LOG2 = math.log(2)


def batch_of(*samples: list[float | None]) -> Batch:
    """Samples by the log-ratio of their tokens (None: off the loss mask, and its log-probs mean nothing), each behind a
    prompt token."""
    flat = [value for sample in samples for value in (None, *sample)]
    on_T = np.array([value is not None for value in flat])
    roll_T = np.where(on_T, np.linspace(-3, -1, len(flat)), np.nan)
    order_B = np.arange(len(samples))
    columns = {
        "length_B": np.array([len(sample) + 1 for sample in samples]),
        "loss_mask_T": on_T.astype(np.uint8),
        "rollout_logprob_T": roll_T,
        "old_logprob_T": roll_T + np.array([value or 0.0 for value in flat]),
        **{name: order_B for name in ("id_B", "group_B", "rollout_B")},
    }
    return Batch(columns)


def weights(batch: Batch, anchor: str = "trainer", **table: object) -> list[float]:
    column_T, _ = correct(Correction.model_validate(table), batch, anchor)
    assert column_T.dtype == np.float32
    assert not column_T[batch["loss_mask_T"] == 0].any()
    return column_T[batch["loss_mask_T"] > 0].tolist()


def test_levels_by_hand() -> None:
    """Ratios 2 and 2 of a sample with a hole, 1/8 of one with a single token: tokens, products, geometric means."""
    batch = batch_of([LOG2, None, None, LOG2], [-3 * LOG2], [None])
    wide = {"mode": "clip", "low": 1e-3, "high": 1e3}
    assert weights(batch, level="token", **wide) == pytest.approx([2, 2, 1 / 8])
    assert weights(batch, level="sequence", **wide) == pytest.approx([4, 4, 1 / 8])
    assert weights(batch_of([LOG2, None, -LOG2 / 2], [0.3]), level="geometric", **wide) == pytest.approx(
        [2**0.25, 2**0.25, math.exp(0.3)]
    )


def test_modes_by_hand() -> None:
    """Ratios 4, 1.5, 0.8 and 0.1: TIS bounds from above alone, IcePop drops what is outside, and inside the ratio
    stays."""
    batch = batch_of([math.log(4), math.log(1.5)], [math.log(0.8), math.log(0.1)])
    assert weights(batch) == pytest.approx([2, 1.5, 0.8, 0.1])
    assert weights(batch, high=3.0) == pytest.approx([3, 1.5, 0.8, 0.1])
    assert weights(batch, mode="clip") == pytest.approx([2, 1.5, 0.8, 0.5])
    assert weights(batch, mode="clip", low=0.9, high=5.0) == pytest.approx([4, 1.5, 0.9, 0.9])
    assert weights(batch, mode="mask") == pytest.approx([0, 1.5, 0.8, 0])
    assert weights(batch, mode="mask", low=0.05, high=1.2) == pytest.approx([0, 0, 0.8, 0.1])
    # whole samples: 4·1.5 = 6 and 0.8·0.1 = 0.08 are both outside; their geometric means are far outside 1 % too
    assert weights(batch, mode="mask", level="sequence") == [0, 0, 0, 0]
    assert weights(batch, mode="mask", level="geometric") == [0, 0, 0, 0]
    near = batch_of([0.3, -0.305], [0.02, 0.02])
    assert weights(near, mode="mask", level="geometric") == pytest.approx([math.exp(-0.0025)] * 2 + [0, 0])


def test_against_the_sampler_a_mask_leaves_tokens_as_they_are() -> None:
    """The loss's ratio is current / sampler then: a weight of its own would count the gap twice."""
    batch = batch_of([math.log(4), math.log(1.5)], [math.log(0.8), math.log(0.1)])
    assert weights(batch, "sampler", mode="mask") == [0, 1, 1, 0]


def test_extreme_ratios_stay_finite() -> None:
    batch = batch_of([800.0, -800.0, 1e-9])
    assert weights(batch, mode="clip", low=1e-12, high=1e12) == pytest.approx([math.exp(20), math.exp(-20), 1])
    found = diagnostics(batch)
    assert all(math.isfinite(value) for value in found.values())


def test_what_is_said_of_the_weights() -> None:
    batch = batch_of([math.log(4), math.log(1.5)], [math.log(0.8), math.log(0.1)])
    _, masked = correct(Correction(mode="mask"), batch, "trainer")
    assert masked == pytest.approx(
        {"correction/masked": 0.5, "correction/weight_mean": 2.3 / 4, "correction/ess": 2.3**2 / (4 * (2.25 + 0.64))}
    )
    _, bounded = correct(Correction(), batch, "trainer")
    assert bounded["correction/bounded"] == 0.25
    nothing = batch_of([None], [None, None])
    assert set(correct(Correction(mode="mask"), nothing, "trainer")[1].values()) == {0.0}
    assert set(diagnostics(nothing).values()) == {0.0}


def test_diagnostics_against_a_slow_loop() -> None:
    rng = np.random.default_rng(2)
    samples = [[float(x) if rng.random() < 0.7 else None for x in rng.normal(0, 0.3, n)] for n in range(1, 14)]
    batch = batch_of(*samples)
    found, lr = diagnostics(batch), [x for sample in samples for x in sample if x is not None]
    assert found["rollout/kl_sampler_trainer"] == pytest.approx(sum(math.exp(x) - 1 - x for x in lr) / len(lr))
    want = sum(math.exp(x) * x - math.exp(x) + 1 for x in lr) / len(lr)
    assert found["rollout/kl_trainer_sampler"] == pytest.approx(want)
    k = [math.exp(x) for x in lr]
    assert found["rollout/ess"] == pytest.approx(sum(k) ** 2 / (len(k) * sum(x * x for x in k)))
    by_length = sorted(([x for x in sample if x is not None] for sample in samples), key=len)
    parts = np.array_split(np.array([sample for sample in by_length if sample], dtype=object), 4)
    for number, part in enumerate(parts, 1):
        gaps = [abs(x) for sample in part for x in sample]
        assert found[f"rollout/logprob_gap_length_q{number}"] == pytest.approx(sum(gaps) / len(gaps))
    without = Batch({name: column for name, column in batch.columns.items() if name != "old_logprob_T"})
    assert diagnostics(without) == {}


# ── log-probs that are no number ──────────────────────────────────────────────────────────────────


def test_few_non_numbers_count_nowhere_and_many_stop_the_run() -> None:
    """Neither in a sum nor in what it is divided by: as if a tool had written the token."""
    samples: list[list[float | None]] = [[0.1] * 1000, [0.2] * 500]
    bad = batch_of(*samples)
    at = 700
    bad["old_logprob_T"][at] = -np.inf
    left, count = without_non_numbers(bad)
    hole = batch_of([*samples[0][: at - 1], None, *samples[0][at:]], samples[1])
    assert count == 1
    assert (left["loss_mask_T"] == hole["loss_mask_T"]).all()
    for level in ("token", "sequence", "geometric"):
        table = Correction(level=level, mode="clip", low=1e-9, high=1e9)
        got, want = correct(table, left, "trainer"), correct(table, hole, "trainer")
        assert got[0] == pytest.approx(want[0])
        assert got[1] == pytest.approx(want[1])
    assert diagnostics(left) == pytest.approx(diagnostics(hole))
    bad["old_logprob_T"][:60] = np.nan
    same, none = without_non_numbers(bad)
    assert (same is bad, none) == (True, 0)
    with pytest.raises(NotFiniteError, match="the actor's log-prob"):
        finite_check.check_batch(same, np.zeros(2, np.float32), 1)
    assert without_non_numbers(batch_of([0.1, 0.2]))[1] == 0


# ── in a step ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("anchor", ["auto", "sampler"])
def test_the_driver_sends_the_weights_with_every_update(tmp_path: Path, anchor: str) -> None:
    """All mini-batches have the same: they do not depend on how the step is split, nor on what it learned."""
    options = ("mini_batches_per_step=2", 'correction={mode="mask", high=1.3}', f'anchor="{anchor}"')
    driver, actor = driver_of(tmp_path, *(f"algorithm.{key}" for key in options))
    batch, scored = drawn()
    old_T = np.random.default_rng(1).normal(0, 0.5, batch.num_tokens).astype(np.float32)
    batch = Batch({**batch.columns, "old_logprob_T": old_T})
    learned = driver.add_advantages(driver.add_correction(batch), scored)
    driver.update(learned, 1)
    want = dict(zip(batch["tokens_T"].tolist(), learned["correction_T"].tolist(), strict=True))
    shares = [share for told in actor.told for share, _ in told]
    sent: dict[int, float] = {}
    for share in shares:
        sent |= dict(zip(share["tokens_T"].tolist(), share["correction_T"].tolist(), strict=True))
    assert sent == want
    assert (set(want.values()) == {0.0, 1.0}) == (anchor == "sampler")
    assert 0 < driver.correction_metrics["correction/masked"] < 1
    assert ("old_logprob_T" in shares[0]) == (anchor == "auto")


def test_a_gap_over_its_limit_stops_the_run_whatever_the_correction_would_do(tmp_path: Path) -> None:
    """Every token is 4 nats off: a mask would leave nothing to learn from, and nothing to notice."""
    options = ['algorithm.correction={mode="mask"}', "algorithm.mini_batches_per_step=2"]
    limits = GapLimits(*gap_limits(load_spec(preset("fake", tmp_path), options)), tmp_path, {}, lambda text: None)
    asked: list[Any] = []
    actor = LocalGroup("actor", [{Verb.UPDATE: lambda call, emit: asked.append(call)}] * 2)
    driver = rl_driver(tmp_path, {"actor": actor}, *options, limits=limits)
    batch, scored = drawn()
    columns = {name: column for name, column in batch.columns.items() if name != "old_logprob_T"}
    broken = Batch({**columns, "old_logprob_T": batch["rollout_logprob_T"] - 4, "row_B": batch["id_B"]})
    learned = driver.add_advantages(driver.add_correction(broken), scored)
    with pytest.raises(LogprobGapError, match="disagree about the sampled tokens"):
        driver.update(learned, 1)
    assert asked == []
