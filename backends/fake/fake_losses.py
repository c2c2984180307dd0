"""Losses of the fake engine. The clipped surrogate and the value loss are written in numpy with their derivatives; the
other policy losses, and objectives, are those of `backends/train`, by autograd. N: loss tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from backends.token_metrics import TokenValues, ValueTokens, token_values
from specs.schema.algorithms.algorithm import Loss
from specs.schema.algorithms.algorithm_tables import PpoClip, ValueLoss
from specs.wire.batch import Batch

if TYPE_CHECKING:  # it imports torch
    from backends.train.objective_losses import ObjectiveColumns

Column = NDArray[np.float64]


@dataclass(frozen=True)
class FakeColumns:
    """The columns that the loss reads at each loss token besides the model's own numbers: `TokenColumns` in numpy."""

    weight_N: Column
    advantage_N: Column
    rollout_logprob_N: Column
    old_logprob_N: Column | None
    ref_logprob_N: Column | None
    of_sequence: Mapping[str, Column] = field(default_factory=dict)
    correction_N: Column | None = None
    covariant_N: Column | None = None


@dataclass(frozen=True)
class FakeTerms:
    """The loss (already weighted and summed), its derivatives by log-prob and entropy, and what the table declares."""

    loss: float
    by_logprob_N: Column
    by_entropy_N: Column
    sums: dict[str, float]
    maxima: dict[str, float]


def fake_policy_loss(logprob_N: Column, entropy_N: Column, columns: FakeColumns, loss: Loss) -> FakeTerms:
    """Return what `backends.train.losses.policy_loss` does, with derivatives; without torch for the loss `ppo_clip`."""
    if not isinstance(loss, PpoClip):
        return _by_autograd(logprob_N, entropy_N, columns, loss)
    trainer_N = logprob_N if columns.old_logprob_N is None else columns.old_logprob_N
    log_ratio_N = logprob_N - (columns.rollout_logprob_N if loss.anchor == "sampler" else trainer_N)
    ratio_N = np.exp(np.clip(log_ratio_N, -20, 20))
    loss_N, by_logprob_N, clipped_N = _clipped_surrogate(log_ratio_N, ratio_N, columns.advantage_N, loss)
    kl_N = np.zeros_like(logprob_N)
    if columns.correction_N is not None:
        loss_N, by_logprob_N = columns.correction_N * loss_N, columns.correction_N * by_logprob_N
    if columns.ref_logprob_N is not None:
        kl_N, kl_by_logprob_N = _kl(columns.ref_logprob_N - logprob_N, loss.kl_estimator)
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
        float(weighted_N.sum()),
        columns.weight_N * by_logprob_N,
        -loss.entropy_coef * columns.weight_N,
        {name: float(value_N.sum()) for name, value_N in sums},
        {name: float(value_N.max()) for name, value_N in maxima},
    )


def _by_autograd(logprob_N: Column, entropy_N: Column, columns: FakeColumns, loss: Loss) -> FakeTerms:
    import torch

    from backends.train.losses import TokenColumns, policy_loss

    def tensor(column: Column | None) -> torch.Tensor | None:
        return None if column is None else torch.from_numpy(column)

    given = {item.name: getattr(columns, item.name) for item in fields(columns)}
    of_sequence = {name: torch.from_numpy(column_N) for name, column_N in given.pop("of_sequence").items()}
    read = TokenColumns(of_sequence=of_sequence, **{name: tensor(column_N) for name, column_N in given.items()})  # type: ignore[arg-type]
    lp_N = torch.tensor(logprob_N, requires_grad=True)
    total, sums, maxima = policy_loss(lp_N, torch.from_numpy(entropy_N), read, loss)
    (by_logprob_N,) = torch.autograd.grad(total, lp_N)
    return FakeTerms(
        total.item(),
        by_logprob_N.numpy(),
        -loss.entropy_coef * columns.weight_N,
        dict(zip(loss.summed(), sums.tolist(), strict=True)),
        dict(zip(loss.maxima(), maxima.tolist(), strict=True)),
    )


def fake_objective(
    value_N: Column, columns: ObjectiveColumns, entropy_N: Column | None = None, correct_N: Column | None = None
) -> tuple[Column, dict[str, float]]:
    """Return the derivative of an objective by all values of a micro-batch, scores or, with entropies and which tokens
    are the likeliest, log-probs; and what the table declares."""
    import torch

    values_N = torch.from_numpy(value_N)
    known, sums = columns.settled(values_N)
    by_value_N = known.by_value_N
    if entropy_N is not None and correct_N is not None:
        tokens = (values_N, torch.from_numpy(entropy_N), torch.from_numpy(correct_N))
        by_value_N, of_tokens = known.backward(*tokens, 0, len(value_N))
        sums = sums + of_tokens
    assert by_value_N is not None
    return by_value_N.numpy(), dict(zip(columns.objective.summed(), sums.tolist(), strict=True))


def fake_sequence_columns(
    batch: Batch, loss: Loss, logprobs: Callable[[], NDArray[np.float32]]
) -> Mapping[str, Column]:
    """Return the loss's per-sequence columns."""
    if not loss.sequence_columns:
        return {}
    from backends.train.losses import sequence_columns

    return sequence_columns(batch, loss, logprobs)


def fake_value_loss(
    value_N: Column, weight_N: Column, old_value_N: Column, return_N: Column, loss: ValueLoss
) -> tuple[float, Column, dict[str, float]]:
    """Return the loss, its derivative by the values, and what the table declares (Schulman et al. 2017)."""
    error_N = value_N - return_N
    loss_N, clipped_N = 0.5 * error_N**2, np.zeros(len(value_N), dtype=np.bool_)
    if loss.value_clip is not None:
        near_N = old_value_N + np.clip(value_N - old_value_N, -loss.value_clip, loss.value_clip)
        clipped_N = (near_N - return_N) ** 2 > error_N**2
        loss_N = np.where(clipped_N, 0.5 * (near_N - return_N) ** 2, loss_N)
    weighted_N = weight_N * loss_N
    tokens = ValueTokens(weighted_N, value_N, return_N, clipped_N)
    sums = zip(loss.summed(), token_values(loss.summed(), tokens), strict=True)
    by_value_N = np.where(clipped_N, 0.0, weight_N * error_N)
    return float(weighted_N.sum()), by_value_N, {name: float(value.sum()) for name, value in sums}


def _kl(d_N: Column, estimator: str) -> tuple[Column, Column]:
    """Return the estimate and its derivative by the log-prob, from d = ref - logprob."""
    if estimator == "k2":
        return 0.5 * d_N**2, -d_N
    if estimator == "k1-straight-through":
        return -d_N, -d_N
    exp_N = np.exp(np.clip(d_N, -20, 20))
    k3_N = exp_N - d_N - 1
    value_N = np.clip(k3_N, -10, 10)
    if estimator == "k3-straight-through":
        return value_N, -d_N
    inside = np.abs(d_N) <= 20
    return value_N, np.where(np.abs(k3_N) <= 10, 1 - exp_N * inside, 0.0)


def _clipped_surrogate(
    log_ratio_N: Column, ratio_N: Column, advantage_N: Column, loss: PpoClip
) -> tuple[Column, Column, NDArray[np.bool_]]:
    """Return the loss, its derivative by the log-prob, and where the clip decided."""
    plain_N = -advantage_N * ratio_N
    bounded_N = -advantage_N * np.clip(ratio_N, 1 - loss.clip_low, 1 + loss.clip_high)
    clipped_N = bounded_N > plain_N
    loss_N = np.where(clipped_N, bounded_N, plain_N)
    if loss.dual_clip is not None:
        ceiling_N = -advantage_N * loss.dual_clip
        over_N = (advantage_N < 0) & (loss_N > ceiling_N)
        loss_N, clipped_N = np.where(over_N, ceiling_N, loss_N), clipped_N | over_N
    return loss_N, np.where(clipped_N | (np.abs(log_ratio_N) > 20), 0.0, plain_N), clipped_N
