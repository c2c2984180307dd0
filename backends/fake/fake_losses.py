"""The losses in numpy with their derivatives written out: used by the fake engine, and by tests to check
`backends/train/losses.py`, which has the formulas' papers. N: loss tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from backends.packed.packing import log_ratio_T
from backends.token_metrics import TokenValues, ValueTokens, no_function, token_values
from specs.schema.algorithms.algorithm import FunctionLoss, Loss
from specs.schema.algorithms.algorithm_tables import (
    CispoLoss,
    ClipCovLoss,
    GmpoLoss,
    GspoLoss,
    KlCovLoss,
    PpoClip,
    SapoLoss,
    ValueLoss,
)
from specs.wire.batch import Batch

Column = NDArray[np.float64]


@dataclass(frozen=True)
class FakeColumns:
    """Hold what the loss reads at each loss token besides the model's own numbers."""

    weight_N: Column
    advantage_N: Column
    rollout_logprob_N: Column
    old_logprob_N: Column | None
    ref_logprob_N: Column | None
    of_sequence: Mapping[str, Column] = field(default_factory=dict)
    correction_N: Column | None = None
    covariant_N: Column | None = None


@dataclass(frozen=True)
class FakePolicyLoss:
    """A policy loss before weights, and its derivative by the log-prob."""

    loss_N: Column
    by_logprob_N: Column
    log_ratio_N: Column
    ratio_N: Column
    clipped_N: NDArray[np.bool_]


@dataclass(frozen=True)
class FakeTerms:
    """The loss (already weighted and summed), its derivatives by log-prob and entropy, and what the table declares."""

    loss: float
    by_logprob_N: Column
    by_entropy_N: Column
    sums: dict[str, float]
    maxima: dict[str, float]


def fake_policy_loss(logprob_N: Column, entropy_N: Column, columns: FakeColumns, loss: Loss) -> FakeTerms:
    """The same as `backends.train.losses.policy_loss`, in numpy with written-out derivatives."""
    trainer_N = logprob_N if columns.old_logprob_N is None else columns.old_logprob_N
    anchor_N = columns.rollout_logprob_N if loss.anchor == "sampler" else trainer_N
    policy = fake_loss(loss)(logprob_N, anchor_N, columns, loss)
    loss_N, by_logprob_N, kl_N = policy.loss_N, policy.by_logprob_N, np.zeros_like(logprob_N)
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
        log_ratio_N=policy.log_ratio_N,
        ratio_N=policy.ratio_N,
        clipped_N=policy.clipped_N,
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


def fake_value_loss(
    value_N: Column, weight_N: Column, old_value_N: Column, return_N: Column, loss: ValueLoss
) -> tuple[float, Column, dict[str, float]]:
    """The loss, its derivative by the values, and what the table declares (Schulman et al. 2017)."""
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
    """Estimate and its derivative by the log-prob, from d = ref - logprob."""
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


# ── the losses, by table ──────────────────────────────────────────────────────────────────────────


def _ppo_clip(logprob_N: Column, anchor_N: Column, columns: FakeColumns, loss: PpoClip) -> FakePolicyLoss:
    return _clipped_surrogate(logprob_N - anchor_N, columns.advantage_N, loss, loss.dual_clip)


def _clipped_surrogate(
    log_ratio_N: Column, advantage_N: Column, loss: PpoClip | ClipCovLoss, dual_clip: float | None = None
) -> FakePolicyLoss:
    ratio_N = np.exp(np.clip(log_ratio_N, -20, 20))
    plain_N = -advantage_N * ratio_N
    bounded_N = -advantage_N * np.clip(ratio_N, 1 - loss.clip_low, 1 + loss.clip_high)
    clipped_N = bounded_N > plain_N
    loss_N = np.where(clipped_N, bounded_N, plain_N)
    if dual_clip is not None:
        ceiling_N = -advantage_N * dual_clip
        over_N = (advantage_N < 0) & (loss_N > ceiling_N)
        loss_N, clipped_N = np.where(over_N, ceiling_N, loss_N), clipped_N | over_N
    by_logprob_N = np.where(clipped_N | (np.abs(log_ratio_N) > 20), 0.0, plain_N)
    return FakePolicyLoss(loss_N, by_logprob_N, log_ratio_N, ratio_N, clipped_N)


def _gspo(logprob_N: Column, anchor_N: Column, columns: FakeColumns, loss: GspoLoss) -> FakePolicyLoss:
    """d ρ_t / d lp_t = ρ, the sequence's ratio, wherever the clip leaves it alone."""
    log_ratio_N = columns.of_sequence["log_ratio_B"]
    ratio_N = np.exp(np.clip(log_ratio_N, -20, 20))
    over_N = (columns.advantage_N > 0) & (ratio_N > 1 + loss.clip_high)
    under_N = (columns.advantage_N < 0) & (ratio_N < 1 - loss.clip_low)
    bounded_N = np.where(over_N, 1 + loss.clip_high, np.where(under_N, 1 - loss.clip_low, ratio_N))
    inside_N = ~(over_N | under_N) & (np.abs(log_ratio_N) <= 20)
    by_logprob_N = np.where(inside_N, -columns.advantage_N * ratio_N, 0.0)
    return FakePolicyLoss(-columns.advantage_N * bounded_N, by_logprob_N, log_ratio_N, ratio_N, over_N | under_N)


def _cispo(logprob_N: Column, anchor_N: Column, columns: FakeColumns, loss: CispoLoss) -> FakePolicyLoss:
    log_ratio_N = logprob_N - anchor_N
    ratio_N = np.exp(np.clip(log_ratio_N, -20, 20))
    weight_N = np.clip(ratio_N, 1 - loss.clip_low, 1 + loss.clip_high)
    slope_N = -weight_N * columns.advantage_N
    return FakePolicyLoss(slope_N * logprob_N, slope_N, log_ratio_N, ratio_N, weight_N != ratio_N)


def _sapo(logprob_N: Column, anchor_N: Column, columns: FakeColumns, loss: SapoLoss) -> FakePolicyLoss:
    """d σ(τ(ρ - 1))·4/τ / d lp = 4·σ(1 - σ)·ρ."""
    log_ratio_N = logprob_N - anchor_N
    ratio_N = np.exp(np.clip(log_ratio_N, -20, 20))
    tau_N = np.where(columns.advantage_N > 0, loss.tau_positive, loss.tau_negative)
    gate_N = 1 / (1 + np.exp(np.minimum(tau_N * (1 - ratio_N), 700)))
    slope_N = np.where(np.abs(log_ratio_N) <= 20, -columns.advantage_N * 4 * gate_N * (1 - gate_N) * ratio_N, 0.0)
    nothing_N = np.zeros(len(ratio_N), dtype=np.bool_)
    return FakePolicyLoss(-columns.advantage_N * gate_N * 4 / tau_N, slope_N, log_ratio_N, ratio_N, nothing_N)


def _mean_log_ratio(batch: Batch, loss: Loss, logprob_T: NDArray[np.float32]) -> dict[str, Column]:
    ratio_T, mask_T, which_T = log_ratio_T(batch, loss, logprob_T), batch["loss_mask_T"] != 0, batch.sequence_T
    mean_B = [ratio_T[mask_T & (which_T == i)].mean() if mask_T[which_T == i].any() else 0 for i in range(len(batch))]
    return {"log_ratio_B": np.array(mean_B, dtype=np.float64)}


def _mean_clipped_log_ratios(batch: Batch, loss: GmpoLoss, logprob_T: NDArray[np.float32]) -> dict[str, Column]:
    ratio_T, mask_T, which_T = log_ratio_T(batch, loss, logprob_T), batch["loss_mask_T"] != 0, batch.sequence_T
    up_B, down_B = np.zeros(len(batch)), np.zeros(len(batch))
    for i in range(len(batch)):
        if len(own := ratio_T[mask_T & (which_T == i)]):
            up_B[i] = np.mean([min(one, loss.clip_high) for one in own])
            down_B[i] = np.mean([max(one, -loss.clip_low) for one in own])
    return {"log_ratio_up_B": up_B, "log_ratio_down_B": down_B}


def _gmpo(logprob_N: Column, anchor_N: Column, columns: FakeColumns, loss: GmpoLoss) -> FakePolicyLoss:
    log_ratio_N, up_N = logprob_N - anchor_N, columns.advantage_N > 0
    clipped_N = np.where(up_N, log_ratio_N > loss.clip_high, log_ratio_N < -loss.clip_low)
    mean_N = np.where(up_N, columns.of_sequence["log_ratio_up_B"], columns.of_sequence["log_ratio_down_B"])
    ratio_N = np.exp(np.clip(mean_N, -20, 20))
    loss_N = -columns.advantage_N * ratio_N
    return FakePolicyLoss(loss_N, np.where(clipped_N, 0.0, loss_N), mean_N, ratio_N, clipped_N)


def _clip_cov(logprob_N: Column, anchor_N: Column, columns: FakeColumns, loss: ClipCovLoss) -> FakePolicyLoss:
    clipped, chosen_N = _clipped_surrogate(logprob_N - anchor_N, columns.advantage_N, loss), _chosen(columns)
    return replace(
        clipped,
        loss_N=clipped.loss_N * ~chosen_N,
        by_logprob_N=clipped.by_logprob_N * ~chosen_N,
        clipped_N=clipped.clipped_N | chosen_N,
    )


def _kl_cov(logprob_N: Column, anchor_N: Column, columns: FakeColumns, loss: KlCovLoss) -> FakePolicyLoss:
    """d |log ρ| / d lp is the sign of log ρ."""
    log_ratio_N, chosen_N = logprob_N - anchor_N, _chosen(columns)
    ratio_N = np.exp(np.clip(log_ratio_N, -20, 20))
    plain_N, coef_N = -columns.advantage_N * ratio_N, loss.covariance_kl_coef * chosen_N
    by_logprob_N = np.where(np.abs(log_ratio_N) <= 20, plain_N, 0.0) + coef_N * np.sign(log_ratio_N)
    return FakePolicyLoss(plain_N + coef_N * np.abs(log_ratio_N), by_logprob_N, log_ratio_N, ratio_N, chosen_N)


def _chosen(columns: FakeColumns) -> NDArray[np.bool_]:
    assert columns.covariant_N is not None
    return np.asarray(columns.covariant_N > 0)


def _function(logprob_N: Column, anchor_N: Column, columns: FakeColumns, loss: FunctionLoss) -> FakePolicyLoss:
    """The user's own is written in torch, which has its derivatives."""
    import torch

    from backends.train.own_loss import own_loss

    tensor_N = torch.tensor(logprob_N, requires_grad=True)
    loss_N = own_loss(loss.path, tensor_N, torch.tensor(anchor_N), torch.tensor(columns.advantage_N))
    (by_logprob_N,) = torch.autograd.grad(loss_N.sum(), tensor_N)
    log_ratio_N = logprob_N - anchor_N
    nothing_N = np.zeros(len(logprob_N), dtype=np.bool_)
    values = loss_N.detach().numpy(), by_logprob_N.numpy()
    return FakePolicyLoss(*values, log_ratio_N, np.exp(np.clip(log_ratio_N, -20, 20)), nothing_N)


FAKE_LOSSES: Mapping[type[Loss], Callable[..., FakePolicyLoss]] = {
    PpoClip: _ppo_clip,
    GspoLoss: _gspo,
    CispoLoss: _cispo,
    SapoLoss: _sapo,
    FunctionLoss: _function,
    GmpoLoss: _gmpo,
    ClipCovLoss: _clip_cov,
    KlCovLoss: _kl_cov,
}
FAKE_SEQUENCE_COLUMNS: Mapping[type[Loss], Callable[..., dict[str, Column]]] = {
    GspoLoss: _mean_log_ratio,
    GmpoLoss: _mean_clipped_log_ratios,
}


def fake_loss(loss: Loss) -> Callable[..., FakePolicyLoss]:
    """Raises RlctlError when there is none."""
    if type(loss) not in FAKE_LOSSES:
        raise no_function(loss, FAKE_LOSSES, "FAKE_LOSSES in backends/fake/fake_losses.py")
    return FAKE_LOSSES[type(loss)]


def fake_sequence_columns(batch: Batch, loss: Loss, logprobs: Callable[[], NDArray[np.float32]]) -> dict[str, Column]:
    """The same as `backends.train.losses.sequence_columns`, in numpy."""
    if loss.anchor == "current":
        return {name: np.zeros(len(batch)) for name in loss.sequence_columns}
    function = FAKE_SEQUENCE_COLUMNS.get(type(loss))
    return function(batch, loss, logprobs()) if function is not None else {}
