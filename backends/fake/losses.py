"""GRPO's loss in numpy with its derivatives written out: the fake engine's, and the tests' second opinion on
`backends/train/losses.py`. N: loss tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specs.algorithms import Grpo

Column = NDArray[np.float64]


@dataclass(frozen=True)
class GrpoTerms:
    """The loss (already weighted and summed), its derivatives by log-prob and entropy, and sums for the metrics."""

    loss: float
    by_logprob_N: Column
    by_entropy_N: Column
    sums: dict[str, float]
    logprob_gap_max: float


def grpo_terms(
    logprob_N: Column,
    entropy_N: Column,
    weight_N: Column,
    advantage_N: Column,
    rollout_logprob_N: Column,
    old_logprob_N: Column | None,
    ref_logprob_N: Column | None,
    algorithm: Grpo,
    sampler_is_old: bool = False,
) -> GrpoTerms:
    """See `backends.train.losses.grpo_loss` for the formulas and their papers."""
    trainer_N = logprob_N if old_logprob_N is None else old_logprob_N
    old_N = rollout_logprob_N if sampler_is_old else trainer_N
    difference_N = logprob_N - old_N
    ratio_N = np.exp(np.clip(difference_N, -20, 20))
    plain_N = -advantage_N * ratio_N
    bounded_N = -advantage_N * np.clip(ratio_N, 1 - algorithm.clip_low, 1 + algorithm.clip_high)
    clipped_N = bounded_N > plain_N
    loss_N = np.where(clipped_N, bounded_N, plain_N)
    if algorithm.dual_clip is not None:
        ceiling_N = -advantage_N * algorithm.dual_clip
        over_N = (advantage_N < 0) & (loss_N > ceiling_N)
        loss_N, clipped_N = np.where(over_N, ceiling_N, loss_N), clipped_N | over_N
    by_logprob_N = np.where(clipped_N | (np.abs(difference_N) > 20), 0.0, plain_N)
    kl_N = np.zeros_like(logprob_N)
    if ref_logprob_N is not None:
        kl_N, kl_by_logprob_N = _kl(ref_logprob_N - logprob_N, algorithm.kl_estimator)
        loss_N = loss_N + algorithm.kl_coef * kl_N
        by_logprob_N = by_logprob_N + algorithm.kl_coef * kl_by_logprob_N
    loss = float((weight_N * (loss_N - algorithm.entropy_coef * entropy_N)).sum())
    gap_N = np.abs(rollout_logprob_N - trainer_N)
    sums = {
        "loss": loss,
        "entropy": float(entropy_N.sum()),
        "kl": float(kl_N.sum()),
        "clipped": float(clipped_N.sum()),
        "logprob_gap": float(gap_N.sum()),
        "approx_kl": float((ratio_N - 1 - difference_N).sum()),
        "ratio": float(ratio_N.sum()),
    }
    return GrpoTerms(
        loss, weight_N * by_logprob_N, -algorithm.entropy_coef * weight_N, sums, float(gap_N.max(initial=0.0))
    )


def _kl(d_N: Column, estimator: str) -> tuple[Column, Column]:
    """Estimate and its derivative by the log-prob, from d = ref - logprob."""
    if estimator == "k2":
        return 0.5 * d_N**2, -d_N
    exp_N = np.exp(np.clip(d_N, -20, 20))
    k3_N = exp_N - d_N - 1
    value_N = np.clip(k3_N, -10, 10)
    if estimator == "k3-straight-through":
        return value_N, -d_N
    inside = np.abs(d_N) <= 20
    return value_N, np.where(np.abs(k3_N) <= 10, 1 - exp_N * inside, 0.0)
