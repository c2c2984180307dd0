"""Masks with holes, on every train engine: a sample of several turns holds what tools replied between the completions.
Off the mask every per-token column is NaN here, so that whoever reads it there shows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from train_helpers import (
    VOCAB,
    grpo,
    largest_gap,
    scale_of,
    weights_of,
)

from backends.protocol import LossScale, TrainEngine
from specs.wire.batch import Batch

Make = Callable[..., TrainEngine]
FULL = {"corrected": True, "kl_coef": 0.1, "entropy_coef": 0.05, "dual_clip": 3.0, "clip_high": 0.28}
AGGREGATIONS = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "token-sum-constant"]
COUNTS = {"sequences", "micro_batches", "flops", "micro_batch_tokens_max"}  # these depend on how samples are cut
PER_TOKEN = ("advantage_T", "rollout_logprob_T", "old_logprob_T", "ref_logprob_T", "correction_T", "covariant_T")

# Stretches of a sample after its prompt: completions by their length, tool replies by minus theirs.
ROLLOUTS = [(3, -2, 2), (1, -1, 1, -3, 4), (2, -4), (5,), (-2, 3), (-3,), (1, -1, 1, -1, 1)]


def several_turns(seed: int = 0, prompts: int = 2) -> Batch:
    """Rollouts of several turns, each shape for each of `prompts` prompts."""
    rng = np.random.default_rng(seed)
    sequences, masks = [], []
    for prompt_tokens in range(2, 2 + prompts):
        prompt = rng.integers(0, VOCAB, prompt_tokens)
        for stretches in ROLLOUTS:
            sizes = np.abs(stretches)
            sequences.append(np.concatenate([prompt, rng.integers(0, VOCAB, sizes.sum())]))
            masks.append(np.concatenate([np.zeros(prompt_tokens), np.repeat(np.array(stretches) > 0, sizes)]))
    mask_T = np.concatenate(masks).astype(np.int8)
    length_B = np.array([len(sequence) for sequence in sequences])

    def on_the_mask(values: np.ndarray) -> np.ndarray:
        return np.where(mask_T, values, np.nan).astype(np.float32)

    columns = {name: on_the_mask(rng.normal(-3, 0.3, len(mask_T))) for name in PER_TOKEN}
    columns["advantage_T"] = on_the_mask(np.repeat(rng.normal(size=len(length_B)), length_B))
    tokens_T = np.concatenate(sequences).astype(np.int32)
    return Batch({"length_B": length_B, "tokens_T": tokens_T, "loss_mask_T": mask_T, **columns})


def cut(batch: Batch, pieces: Callable[[np.ndarray], list[np.ndarray]]) -> Batch:
    """Each sample as several: for each piece of its loss tokens the sample up to the last of them, with their mask."""
    parts = []
    for index, mask in enumerate(batch.sequences("loss_mask_T")):
        (sample,) = (batch.select([index]),)
        for positions in pieces(np.flatnonzero(mask)):
            end = int(positions[-1]) + 1
            columns = {name: column[:end] for name, column in sample.columns.items() if name.endswith("_T")}
            columns["loss_mask_T"] = np.isin(np.arange(end), positions).astype(np.int8)
            parts.append(Batch({**columns, "length_B": np.array([end])}))
    return Batch.concat(parts)


def turns(positions: np.ndarray) -> list[np.ndarray]:
    """[3, 4, 7] → [3, 4], [7]"""
    return [part for part in np.split(positions, np.flatnonzero(np.diff(positions) > 1) + 1) if len(part)]


def single_tokens(positions: np.ndarray) -> list[np.ndarray]:
    return [positions[i : i + 1] for i in range(len(positions))]


@pytest.mark.parametrize("pieces", [turns, single_tokens])
@pytest.mark.parametrize("limit", [10_000, 24])
def test_a_sample_of_several_turns_is_its_turns(make: Make, pieces: Callable, limit: int) -> None:
    """One sample with holes ≡ one sample for each turn ≡ one for each token: metrics, gradient norm, weights."""
    batch = several_turns()
    whole, parts = make(micro_batch_tokens=limit), make(micro_batch_tokens=limit)
    expected = whole.forward_backward(batch, grpo(**FULL), scale_of(batch))
    found = parts.forward_backward(cut(batch, pieces), grpo(**FULL), scale_of(batch))
    for name in expected.keys() - COUNTS:
        assert found[name] == pytest.approx(expected[name], rel=2e-4, abs=1e-5), name
    assert expected["tokens"] == scale_of(batch).num_loss_tokens
    assert np.isfinite(expected["loss"])
    assert parts.optim_step().grad_norm == pytest.approx(whole.optim_step().grad_norm, rel=2e-4)
    assert largest_gap(weights_of(whole), weights_of(parts)) < 2e-5


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_aggregation_counts_loss_tokens_only(make: Make, aggregation: str) -> None:
    """Against token losses that are computed one by one and added up as the name of the aggregation says."""
    batch, limit = several_turns(prompts=1), 15
    engine, algorithm = make(), grpo(**FULL, loss_aggregation=aggregation)
    alone = LossScale(num_loss_tokens=1, num_sequences=1, max_response_tokens=limit)
    means, sums = [], []
    for index in range(len(batch)):
        tokens = cut(batch.select([index]), single_tokens) if batch.select([index])["loss_mask_T"].any() else []
        losses = [engine.forward_backward(tokens.select([i]), grpo(**FULL), alone)["loss"] for i in range(len(tokens))]
        if losses:
            means.append(np.mean(losses))
            sums.append(np.sum(losses))
    expected = {
        "token-mean": np.sum(sums) / scale_of(batch).num_loss_tokens,
        "seq-mean-token-mean": np.mean(means),
        "seq-mean-token-sum": np.mean(sums),
        "token-sum-constant": np.sum(sums) / (limit * len(sums)),
    }[aggregation]
    found = engine.forward_backward(batch, algorithm, scale_of(batch, limit))
    assert found["loss"] == pytest.approx(expected, rel=2e-4, abs=1e-6)
    assert found["sequences"] == len(sums) == len(ROLLOUTS) - 1


def test_logprobs_stand_on_the_mask_and_see_what_lies_in_the_holes(make: Make) -> None:
    batch, engine = several_turns(), make()
    logprob_T = engine.forward(batch)
    every = np.ones(batch.num_tokens, dtype=np.int8)
    every[batch.offsets[:-1]] = 0  # nothing comes before a first token
    whole = Batch({**batch.columns, "loss_mask_T": every})
    mask_T = batch["loss_mask_T"] == 1
    np.testing.assert_allclose(logprob_T[mask_T], engine.forward(whole)[mask_T], atol=2e-5)
    assert (logprob_T[~mask_T] == 0).all()
