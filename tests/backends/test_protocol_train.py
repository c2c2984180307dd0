"""What every train engine must do, tried on each of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import train_helpers
from safetensors import safe_open
from safetensors.numpy import save_file
from train_helpers import (
    grpo,
    gspo,
    largest_gap,
    make_batch,
    make_grouped_batch,
    scale_of,
    weights_of,
)

from backends import activity, token_metrics
from backends.protocol import ENGINE_MAXIMA, ENGINE_SUMS, TrainEngine
from backends.weights.checksum import checksum_bytes
from rlctl.loop.step_metrics import RankReport, update_metrics
from specs.errors import BatchError, CheckpointError
from specs.schema.algorithms.algorithm import Anchor, Loss, LossMetric
from specs.schema.algorithms.algorithm_tables import KlCovLoss, PpoClip
from specs.schema.role_section import Optimizer
from specs.wire.batch import Batch
from specs.wire.bodies import Stepped

Make = Callable[..., TrainEngine]
FULL = {"kl_coef": 0.1, "entropy_coef": 0.05, "dual_clip": 3.0, "clip_high": 0.28}
SPLIT = [  # what a loss reads: tokens, whole sequences, chosen tokens
    grpo(**FULL, loss_aggregation="seq-mean-token-mean"),
    gspo(kl_coef=0.1, corrected=True),
    KlCovLoss(anchor="trainer", kl_coef=0.1),
]


learn = partial(train_helpers.learn, loss=SPLIT[0])


def test_reports_every_metric(make: Make) -> None:
    batch, engine, before = make_batch(), make(), activity.total("micro-batch")
    sums = engine.forward_backward(batch, grpo(**FULL), scale_of(batch))
    assert engine.counts_progress
    assert activity.total("micro-batch") - before == sums["micro_batches"] > 1
    declared = {metric.source for metric in grpo().metrics}
    assert set(sums) == {*declared, *ENGINE_SUMS, *ENGINE_MAXIMA}
    assert sums["tokens"] == scale_of(batch).num_loss_tokens
    assert sums["sequences"] == scale_of(batch).num_sequences
    assert sums["micro_batch_tokens_max"] <= 64
    assert 0 < sums["entropy"] <= sums["tokens"] * np.log(23) + 1e-3
    assert sums["clipped"] > 0
    assert sums["logprob_gap_max"] <= sums["logprob_gap"]


def test_probabilities_of_all_tokens_sum_to_one(make: Make) -> None:
    logprobs = _next_logprobs(make(), [3, 1, 4])
    assert np.exp(logprobs.astype(np.float64)).sum() == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("loss", SPLIT, ids=lambda loss: f"{loss.kind}-{loss.loss_aggregation}")
def test_the_split_into_micro_batches_changes_nothing(make: Make, loss: Loss) -> None:
    """1×N ≡ N×1, over several steps, in loss, gradient norm and weights."""
    results = []
    for limit in (10_000, 20):
        engine = make(micro_batch_tokens=limit)
        results.append((learn(engine, 3, loss=loss), weights_of(engine)))
    assert results[0][0] == pytest.approx(results[1][0], rel=2e-4, abs=1e-6)
    assert largest_gap(results[0][1], results[1][1]) < 2e-5


@pytest.mark.parametrize("loss", SPLIT, ids=lambda loss: f"{loss.kind}-{loss.loss_aggregation}")
def test_the_split_of_a_group_changes_nothing(make: Make, loss: Loss) -> None:
    """Answers to one prompt in one micro-batch, or in several."""
    results = []
    for limit in (10_000, 21):
        engine = make(micro_batch_tokens=limit)
        results.append((learn(engine, 2, loss=loss, batches=make_grouped_batch), weights_of(engine)))
    for seen, weights in results[1:]:
        assert seen == pytest.approx(results[0][0], rel=2e-4, abs=1e-6)
        assert largest_gap(weights, results[0][1]) < 2e-5


@pytest.mark.parametrize("anchor", ["current", "trainer", "sampler"])
def test_gspo_is_what_a_loop_over_sequences_gives(make: Make, anchor: Anchor) -> None:
    """Zheng et al. 2025, eq. 5, from the engine's own log-probs, whatever holes the masks have."""
    engine, batch = make(), make_grouped_batch()
    loss = gspo(anchor=anchor, clip_low=0.1, clip_high=0.5)
    old_T = {"current": engine.forward(batch), "trainer": batch["old_logprob_T"], "sampler": batch["rollout_logprob_T"]}
    log_ratio_T, ratios, total = engine.forward(batch) - old_T[anchor], [], 0.0
    starts = batch.offsets
    for i, mask in enumerate(batch.sequences("loss_mask_T")):
        if not mask.any():
            continue
        s = math.exp(log_ratio_T[starts[i] : starts[i + 1]][mask != 0].astype(np.float64).mean())
        advantage = float(batch["advantage_T"][starts[i]])
        total -= min(s * advantage, min(max(s, 0.9), 1.5) * advantage)
        ratios += [s] * int((mask != 0).sum())
    sums = engine.forward_backward(batch, loss, scale_of(batch))
    assert sums["loss"] == pytest.approx(total / scale_of(batch).num_sequences, rel=1e-4)
    assert sums["ratio"] == pytest.approx(sum(ratios), rel=1e-4)
    assert (sums["clipped"] > 0) == (anchor != "current")


def test_a_metric_declared_beside_a_loss_is_reported(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worked example of CONTRIBUTING: a line beside the loss's table, and a function of the tokens."""
    likely = LossMetric("actor/likely_fraction", "likely", "token_mean", "Tokens that are likely.")
    surest = LossMetric("actor/logprob_max", "logprob", "token_max", "The surest token.")
    monkeypatch.setattr(PpoClip, "metrics", (*PpoClip.metrics, likely, surest))
    functions = {
        "likely": lambda token: token.trainer_logprob_N > -3.0,
        "logprob": lambda token: token.trainer_logprob_N,
    }
    monkeypatch.setattr(token_metrics, "SOURCES", {**token_metrics.SOURCES, **functions})
    engine, batch, loss = make(micro_batch_tokens=30), make_batch(off_policy=False), grpo(anchor="current")
    logprob_N = engine.forward(batch)[batch["loss_mask_T"] != 0]
    updates = []
    for share in (range(5), range(5, 12)):  # as two ranks would hold it
        sums = engine.forward_backward(batch.select(list(share)), loss, scale_of(batch))
        updates.append(RankReport(sums, Stepped(grad_norm=1.0, lr=0.1, skipped=False, peak_GiB=0.0)))
    metrics = update_metrics("actor", loss, [updates])
    assert metrics["actor/likely_fraction"] == pytest.approx((logprob_N > -3.0).mean())
    assert metrics["actor/logprob_max"] == pytest.approx(logprob_N.max(), rel=1e-5)
    assert metrics["actor/entropy"] > 0


def test_two_calls_accumulate_like_one(make: Make) -> None:
    """Shares of a mini-batch given one after another are the mini-batch: traps 1 and 2 of means over means."""
    whole, parts, batch = make(), make(), make_batch()
    algorithm, scale = grpo(loss_aggregation="seq-mean-token-mean", **FULL), scale_of(batch)
    together = whole.forward_backward(batch, algorithm, scale)
    shares = [parts.forward_backward(batch.select(list(part)), algorithm, scale) for part in (range(1), range(1, 12))]
    assert sum(share["loss"] for share in shares) == pytest.approx(together["loss"], rel=1e-5)
    assert parts.optim_step().grad_norm == pytest.approx(whole.optim_step().grad_norm, rel=1e-4)


def test_an_empty_batch_is_legal(make: Make) -> None:
    engine, batch = make(), make_batch()
    assert engine.forward(batch.select([])).shape == (0,)
    sums = engine.forward_backward(batch.select([]), grpo(), scale_of(batch))
    assert sums["loss"] == sums["tokens"] == sums["logprob_gap_max"] == 0
    before = weights_of(engine)
    assert engine.optim_step().grad_norm == 0
    assert not any(np.isnan(value).any() for value in weights_of(engine).values())
    assert before.keys() == weights_of(engine).keys()


def test_samples_of_older_weights_are_weighed_against_their_sampler(make: Make) -> None:
    """The anchor "sampler" does what the sampler's log-probs as `old_logprob_T` do, but the gap is against the current
    ones."""
    batch = make_batch(off_policy=False)
    spelled_out = batch.with_columns(old_logprob_T=batch["rollout_logprob_T"])
    engines = make(), make()
    current_T = engines[0].forward(batch)
    sums = [
        engine.forward_backward(given, grpo(anchor=anchor, **FULL), scale_of(batch))
        for engine, given, anchor in zip(engines, (batch, spelled_out), ("sampler", "trainer"), strict=True)
    ]
    gap_T = np.abs(batch["rollout_logprob_T"] - current_T)[batch["loss_mask_T"] > 0]
    assert sums[0]["logprob_gap"] == pytest.approx(gap_T.sum(), rel=1e-4)
    assert sums[0]["logprob_gap_max"] == pytest.approx(gap_T.max(), rel=1e-4)
    assert sums[1]["logprob_gap"] == 0
    same = sums[0].keys() - {"logprob_gap", "logprob_gap_max"}
    assert [sums[0][name] for name in same] == [sums[1][name] for name in same]
    assert sums[0]["clipped"] > 0
    assert engines[0].optim_step().grad_norm == engines[1].optim_step().grad_norm


def test_offload_is_neutral_at_any_time(make: Make) -> None:
    plain, moved, batch = make(), make(), make_batch()
    for engine in (plain, moved):
        engine.forward_backward(batch, grpo(), scale_of(batch))
        for _ in range(2 * (engine is moved)):
            engine.offload()
        for _ in range(2 * (engine is moved)):
            engine.onload()
        engine.optim_step()
        if engine is moved:
            engine.offload()
            engine.onload()
        engine.forward_backward(make_batch(seed=1), grpo(), scale_of(batch))
        engine.optim_step()
    assert largest_gap(weights_of(plain), weights_of(moved)) == 0


def test_a_step_that_is_not_finite_changes_nothing(make: Make, tmp_path: Path) -> None:
    engine, twin = make(), make()
    for each in (engine, twin):
        learn(each, 1)
    before = weights_of(engine)
    bad = make_batch()
    bad["advantage_T"][:] = np.nan
    engine.forward_backward(bad, grpo(), scale_of(bad))
    result = engine.optim_step()
    assert result.skipped
    assert not np.isfinite(result.grad_norm)
    assert largest_gap(before, weights_of(engine)) == 0
    # neither moments nor schedule nor gradients remember it
    assert learn(engine, 2, first=1) == learn(twin, 2, first=1)
    assert largest_gap(weights_of(engine), weights_of(twin)) == 0
    (tmp_path / "saved").mkdir()
    engine.save(tmp_path / "saved")
    assert '"skipped_steps": 1' in (tmp_path / "saved" / "trainer.json").read_text()


def test_resume_is_exact_to_the_bit(make: Make, tmp_path: Path) -> None:
    optimizer = Optimizer(lr=1e-2, warmup_steps=2, schedule="cosine", weight_decay=0.1)
    straight = make(optimizer=optimizer)
    expected = learn(straight, 6)
    half = make(optimizer=optimizer)
    learn(half, 3)
    tmp_path = tmp_path / "saved"
    tmp_path.mkdir()
    half.save(tmp_path)
    resumed = make(optimizer=optimizer, model={"seed": 99})  # other weights, so that load has to work
    resumed.load(tmp_path)
    assert learn(resumed, 3, first=3) == expected[6:]
    assert largest_gap(weights_of(straight), weights_of(resumed)) == 0


def test_another_models_state_is_refused(make: Make, tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    engine = make()
    engine.save(tmp_path / "saved")
    (path,) = (tmp_path / "saved").glob("model*.safetensors")
    with safe_open(path, "numpy") as file:
        weights, about = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    weights.pop(sorted(weights)[0])
    save_file(weights, path, about)
    with pytest.raises(CheckpointError, match="another model"):
        engine.load(tmp_path / "saved")
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(CheckpointError):
        engine.load(tmp_path / "saved")
    (tmp_path / "saved" / "trainer.json").unlink()
    with pytest.raises(CheckpointError, match=r"trainer\.json"):
        engine.load(tmp_path / "saved")


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_export_is_what_weight_specs_says(make: Make, dtype: str) -> None:
    engine = make()
    specs = engine.weight_specs(dtype)  # type: ignore[arg-type]
    seen = []
    for weight in engine.export_weights(dtype):  # type: ignore[arg-type]
        buffer = np.zeros(weight.spec.nbytes, dtype=np.uint8)
        assert weight.copy_to(buffer) == checksum_bytes(buffer)
        assert weight.spec.nbytes == int(np.prod(weight.spec.shape)) * (4 if dtype == "fp32" else 2)
        seen.append(weight.spec)
    assert seen == list(specs)
    assert len({spec.name for spec in seen}) == len(seen)


def test_greedy_follows_the_log_probs(make: Make) -> None:
    engine = make(temperature=1.0)
    prompts = [[1, 2, 3], [4], [5, 6]]
    answers = engine.greedy(prompts, 4)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert len(answer.tokens) == len(answer.margins) == 4
        assert min(answer.margins) >= 0
        for i, (token, margin) in enumerate(zip(answer.tokens, answer.margins, strict=True)):
            logp = _next_logprobs(engine, [*prompt, *answer.tokens[:i]])
            assert int(logp.argmax()) == token
            best, second = np.sort(logp)[::-1][:2]
            assert margin == pytest.approx(best - second, abs=1e-4)


def _next_logprobs(engine: TrainEngine, prefix: list[int]) -> np.ndarray:
    """log p of each token of the vocabulary after `prefix`."""
    length = len(prefix) + 1
    rows = [[*prefix, token] for token in range(23)]
    batch = Batch(
        {
            "length_B": np.full(23, length),
            "tokens_T": np.concatenate(rows).astype(np.int32),
            "loss_mask_T": np.tile([0] * (length - 1) + [1], 23).astype(np.int8),
        }
    )
    return engine.forward(batch)[length - 1 :: length]


def test_a_sequence_over_the_budget_is_named(make: Make) -> None:
    batch = make_batch()
    longest = int(batch["length_B"].argmax())
    engine = make(micro_batch_tokens=int(batch["length_B"].max()) - 1)
    with pytest.raises(BatchError, match=f"sequence {longest} has"):
        engine.forward(batch)


def test_as_built(make: Make) -> None:
    engine = make()
    built = engine.built()
    assert built.parameters == sum(value.size for value in weights_of(engine).values())
    assert built.trainable_parameters == built.parameters
    assert built.vocab_size == 23
    assert built.dtype == "fp32"
    assert built.weights_checksum == make().built().weights_checksum
    assert built.weights_checksum != make(model={"seed": 4}).built().weights_checksum
    assert make(optimizer=None, role="ref").built().trainable_parameters == 0
