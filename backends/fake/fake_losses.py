"""Losses of the fake engine, by autograd those of `backends/train`. The plain clipped surrogate and the value loss are
written in numpy with their derivatives, so that most runs need no torch. N: values of a micro-batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from backends.token_metrics import TokenColumns, TokenValues, ValueTokens, token_values
from specs.schema.algorithms.algorithm import Loss
from specs.schema.algorithms.algorithm_tables import PpoClip, ValueLoss

if TYPE_CHECKING:  # it imports torch
    from backends.train.objective_losses import ObjectiveColumns

Column = NDArray[np.float64]


@dataclass(frozen=True)
class FakeTerms:
    """The derivatives of a loss by the model's values and by its entropies (None: these do not count), and what the
    table declares, the loss itself among the sums."""

    by_value_N: Column
    by_entropy_N: Column | None
    sums: Mapping[str, float]
    maxima: Mapping[str, float] = field(default_factory=dict)


def fake_policy_loss(logprob_N: Column, entropy_N: Column, columns: TokenColumns, loss: Loss) -> FakeTerms:
    """Return what `backends.train.losses.policy_loss` does, with derivatives."""
    if not isinstance(loss, PpoClip) or loss.dual_clip is not None or loss.kl_estimator != "k3":
        return _by_autograd(logprob_N, entropy_N, columns, loss)
    trainer_N = logprob_N if columns.old_logprob_N is None else columns.old_logprob_N
    log_ratio_N = logprob_N - (columns.rollout_logprob_N if loss.anchor == "sampler" else trainer_N)
    ratio_N = np.exp(np.clip(log_ratio_N, -20, 20))
    plain_N = -columns.advantage_N * ratio_N
    bounded_N = -columns.advantage_N * np.clip(ratio_N, 1 - loss.clip_low, 1 + loss.clip_high)
    clipped_N = bounded_N > plain_N
    loss_N = np.where(clipped_N, bounded_N, plain_N)
    by_logprob_N = np.where(clipped_N | (np.abs(log_ratio_N) > 20), 0.0, plain_N)
    kl_N = np.zeros_like(logprob_N)
    if columns.correction_N is not None:
        loss_N, by_logprob_N = columns.correction_N * loss_N, columns.correction_N * by_logprob_N
    if columns.ref_logprob_N is not None:
        kl_N, kl_by_logprob_N = _k3(columns.ref_logprob_N - logprob_N)
        loss_N = loss_N + loss.kl_coef * kl_N
        by_logprob_N = by_logprob_N + loss.kl_coef * kl_by_logprob_N
    weighted_N = columns.weight_N * (loss_N - loss.entropy_coef * entropy_N)
    tokens = TokenValues(
        loss_N=weighted_N,
        entropy_N=entropy_N,
        kl_N=kl_N,
        log_ratio_N=log_ratio_N,
        ratio_N=ratio_N,
        clipped_N=clipped_N,
        trainer_logprob_N=trainer_N,
        rollout_logprob_N=columns.rollout_logprob_N,
    )
    sums = zip(loss.summed(), token_values(loss.summed(), tokens), strict=True)
    maxima = zip(loss.maxima(), token_values(loss.maxima(), tokens), strict=True)
    return FakeTerms(
        columns.weight_N * by_logprob_N,
        -loss.entropy_coef * columns.weight_N,
        {name: float(value_N.sum()) for name, value_N in sums},
        {name: float(value_N.max()) for name, value_N in maxima},
    )


def _k3(d_N: Column) -> tuple[Column, Column]:
    """Return the estimate and its derivative by the log-prob, from d = ref - logprob."""
    exp_N = np.exp(np.clip(d_N, -20, 20))
    k3_N = exp_N - d_N - 1
    inside = np.abs(d_N) <= 20
    return np.clip(k3_N, -10, 10), np.where(np.abs(k3_N) <= 10, 1 - exp_N * inside, 0.0)


def _by_autograd(logprob_N: Column, entropy_N: Column, columns: TokenColumns, loss: Loss) -> FakeTerms:
    import torch

    from backends.train.losses import policy_loss

    lp_N = torch.tensor(logprob_N, requires_grad=True)
    total, sums, maxima = policy_loss(lp_N, torch.from_numpy(entropy_N), columns.each(torch.from_numpy), loss)
    (by_logprob_N,) = torch.autograd.grad(total, lp_N)
    return FakeTerms(
        by_logprob_N.numpy(),
        -loss.entropy_coef * columns.weight_N,
        dict(zip(loss.summed(), sums.tolist(), strict=True)),
        dict(zip(loss.maxima(), maxima.tolist(), strict=True)),
    )


def fake_objective(
    columns: ObjectiveColumns,
    value_N: Column,
    entropy_N: Column | None = None,
    correct_N: NDArray[np.bool_] | None = None,
) -> FakeTerms:
    """Return an objective of all values of a micro-batch: scores or, with entropies and which tokens are the likeliest,
    log-probs."""
    import torch

    values_N = torch.from_numpy(value_N)
    known, sums = columns.settled(values_N)
    by_value_N = known.by_value_N
    if entropy_N is not None and correct_N is not None:
        tokens = (values_N, torch.from_numpy(entropy_N), torch.from_numpy(correct_N))
        by_value_N, of_tokens = known.backward(*tokens, 0, len(value_N))
        sums = sums + of_tokens
    assert by_value_N is not None
    return FakeTerms(by_value_N.numpy(), None, dict(zip(columns.objective.summed(), sums.tolist(), strict=True)))


def fake_value_loss(
    value_N: Column, weight_N: Column, old_value_N: Column, return_N: Column, loss: ValueLoss
) -> FakeTerms:
    """Return what `backends.train.score_head.value_loss` does, with the derivative (Schulman et al. 2017)."""
    error_N = value_N - return_N
    loss_N, clipped_N = 0.5 * error_N**2, np.zeros(len(value_N), dtype=np.bool_)
    if loss.value_clip is not None:
        moved_N = value_N - old_value_N
        near_N = old_value_N + np.clip(moved_N, -loss.value_clip, loss.value_clip)
        clipped_N = ((near_N - return_N) ** 2 > error_N**2) & (np.abs(moved_N) > loss.value_clip)
        loss_N = np.where(clipped_N, 0.5 * (near_N - return_N) ** 2, loss_N)
    weighted_N = weight_N * loss_N
    tokens = ValueTokens(weighted_N, value_N, return_N, clipped_N)
    sums = zip(loss.summed(), token_values(loss.summed(), tokens), strict=True)
    by_value_N = np.where(clipped_N, 0.0, weight_N * error_N)
    return FakeTerms(by_value_N, None, {name: float(value.sum()) for name, value in sums})
