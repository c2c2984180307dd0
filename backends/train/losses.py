"""Token losses of policy optimisation: pure functions of log-probs, one value per loss token (N).

A loss over a mini-batch is the sum of these, each times its weight (`backends/packed/packing.py: loss_weight_T`), so it
does not depend on how tokens are split over micro-batches and ranks. `LOSSES` has a function for each loss table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from backends.packed.packing import log_ratio_T
from backends.token_metrics import TokenColumns, TokenValues, token_values
from backends.train.own_loss import own_loss
from specs.schema.algorithms.algorithm import FunctionLoss, Loss
from specs.schema.algorithms.algorithm_tables import (
    CispoLoss,
    ClipCovLoss,
    GmpoLoss,
    GspoLoss,
    KlCovLoss,
    PpoClip,
    SapoLoss,
)
from specs.wire.batch import Batch

MAX_LOG_RATIO = 20.0  # exp of more overflows what a gradient can use
MAX_KL = 10.0
NOISE = 1e-4  # log-ratios of this size are mostly rounding in fp32: their sign says nothing


@dataclass(frozen=True)
class PolicyLoss:
    """`loss_N` carries gradient; `log_ratio_N`, `ratio_N` and `clipped_N` (bool: the clip decided) do not."""

    loss_N: Tensor
    log_ratio_N: Tensor
    ratio_N: Tensor
    clipped_N: Tensor


def clipped_surrogate(
    log_ratio_N: Tensor,
    advantage_N: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> PolicyLoss:
    """max(-Aρ, -A·clip(ρ, 1 - low, 1 + high)) with ρ = exp(log-ratio): PPO (Schulman et al. 2017, eq. 7).

    Separate bounds are DAPO's clip-higher (Yu et al. 2025, eq. 10). `dual_clip` c bounds the loss to -A·c where A < 0
    (Ye et al. 2020, eq. 5).
    """
    ratio_N = log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    plain_N = -advantage_N * ratio_N
    bounded_N = -advantage_N * ratio_N.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss_N = torch.maximum(plain_N, bounded_N)
    clipped_N = bounded_N > plain_N
    if dual_clip is not None:
        ceiling_N = -advantage_N * dual_clip
        over_N = (advantage_N < 0) & (loss_N > ceiling_N)
        loss_N = torch.where(over_N, ceiling_N, loss_N)
        clipped_N = clipped_N | over_N
    return PolicyLoss(loss_N, log_ratio_N.detach(), ratio_N.detach(), clipped_N.detach())


def kl_estimate(logprob_N: Tensor, ref_logprob_N: Tensor, anchor_N: Tensor, estimator: str) -> Tensor:
    """Estimate of KL(actor ‖ ref) at each token sampled by the anchor, from d = ref - logprob (Schulman 2020).

    k2: d²/2. k3: exp(d) - d - 1, with d clamped to ±20 inside the exponential and the whole to ±10.
    Straight-through: the value of k1 = -d or k3 with the gradient of k2, which is that of the true KL in expectation
    where the anchor is the actor. Unbiased: that of k3 times the ratio, where it is not (DeepSeek-V3.2, 2025).
    k1 alone has none in expectation: `specs/rules/algorithm_rules.py` refuses it here.
    """
    d_N = ref_logprob_N - logprob_N
    if estimator == "k2":
        return 0.5 * d_N.square()
    if estimator == "k1-straight-through":
        return -d_N.detach() + 0.5 * (d_N.square() - d_N.detach().square())
    k3_N = (d_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp() - d_N - 1.0).clamp(-MAX_KL, MAX_KL)
    if estimator == "k3":
        return k3_N
    k2_N = 0.5 * d_N.square()
    straight_N = k3_N.detach() + k2_N - k2_N.detach()
    if estimator == "k3-straight-through":
        return straight_N
    assert estimator == "k3-unbiased", estimator
    return straight_N * (logprob_N - anchor_N).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


# ── the losses, by table ──────────────────────────────────────────────────────────────────────────


def _ppo_clip(logprob_N: Tensor, anchor_N: Tensor, columns: TokenColumns, loss: PpoClip) -> PolicyLoss:
    return clipped_surrogate(
        logprob_N - anchor_N,
        columns.advantage_N,
        clip_low=loss.clip_low,
        clip_high=loss.clip_high,
        dual_clip=loss.dual_clip,
    )


def _gspo(logprob_N: Tensor, anchor_N: Tensor, columns: TokenColumns, loss: GspoLoss) -> PolicyLoss:
    """log ρ_t = lp - sg(lp) + the sequence's mean log-ratio (Zheng et al. 2025, eq. 14): its value is the sequence's,
    its gradient the token's."""
    log_ratio_N = logprob_N - logprob_N.detach() + columns.of_sequence["log_ratio_B"]
    return clipped_surrogate(log_ratio_N, columns.advantage_N, clip_low=loss.clip_low, clip_high=loss.clip_high)


def _cispo(logprob_N: Tensor, anchor_N: Tensor, columns: TokenColumns, loss: CispoLoss) -> PolicyLoss:
    """-sg(clip(ρ, 1 - low, 1 + high))·A·lp: the ratio is a weight, and no token loses its gradient (Chen et al. 2025,
    eq. 4)."""
    log_ratio_N = (logprob_N - anchor_N).detach()
    ratio_N = log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    weight_N = ratio_N.clamp(1.0 - loss.clip_low, 1.0 + loss.clip_high)
    clipped_N = (weight_N != ratio_N) & (columns.advantage_N != 0)
    return PolicyLoss(-weight_N * columns.advantage_N * logprob_N, log_ratio_N, ratio_N, clipped_N)


def _sapo(logprob_N: Tensor, anchor_N: Tensor, columns: TokenColumns, loss: SapoLoss) -> PolicyLoss:
    """-A·σ(τ(ρ - 1))·4/τ, with τ by the sign of A (Gao et al. 2025, eq. 5 and 6): at ρ = 1 the gradient is that of
    -A·lp, and it fades on both sides."""
    log_ratio_N = logprob_N - anchor_N
    ratio_N = log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    tau_N = torch.full_like(ratio_N, loss.tau_negative).masked_fill(columns.advantage_N > 0, loss.tau_positive)
    gate_N = torch.sigmoid(tau_N * (ratio_N - 1.0)) * 4.0 / tau_N
    nothing_N = torch.zeros_like(ratio_N, dtype=torch.bool)
    return PolicyLoss(-columns.advantage_N * gate_N, log_ratio_N.detach(), ratio_N.detach(), nothing_N)


def _gmpo(logprob_N: Tensor, anchor_N: Tensor, columns: TokenColumns, loss: GmpoLoss) -> PolicyLoss:
    """-A·GM with GM the geometric mean of the sequence's clipped ratios (Zhao et al. 2025, eq. 4): where A > 0 a
    log-ratio counts up to `clip_high`, else down to -`clip_low`. Each token has the value of its sequence, and of the
    gradient the share of its own log-ratio."""
    log_ratio_N, up_N = logprob_N - anchor_N, columns.advantage_N > 0
    bounded_N = torch.where(up_N, log_ratio_N.clamp(max=loss.clip_high), log_ratio_N.clamp(min=-loss.clip_low))
    mean_N = torch.where(up_N, columns.of_sequence["log_ratio_up_B"], columns.of_sequence["log_ratio_down_B"])
    ratio_N = mean_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    loss_N = -columns.advantage_N * ratio_N * (1.0 + bounded_N - bounded_N.detach())
    return PolicyLoss(loss_N, mean_N, ratio_N, (bounded_N != log_ratio_N).detach() & (columns.advantage_N != 0))


def _clip_cov(logprob_N: Tensor, anchor_N: Tensor, columns: TokenColumns, loss: ClipCovLoss) -> PolicyLoss:
    """The clipped surrogate, and 0 at the chosen tokens (Cui et al. 2025, eq. 12)."""
    clipped = clipped_surrogate(
        logprob_N - anchor_N, columns.advantage_N, clip_low=loss.clip_low, clip_high=loss.clip_high
    )
    chosen_N = _chosen(columns)
    return replace(clipped, loss_N=clipped.loss_N.masked_fill(chosen_N, 0.0), clipped_N=clipped.clipped_N | chosen_N)


def _kl_cov(logprob_N: Tensor, anchor_N: Tensor, columns: TokenColumns, loss: KlCovLoss) -> PolicyLoss:
    """-A·ρ + coef·|log ρ| at the chosen tokens, -A·ρ elsewhere (Cui et al. 2025, eq. 14; |log ρ| for the KL at a token
    is the authors' own estimate). The slope of |log ρ| is ±1, and passes through 0 within ±`NOISE`: else a whole
    gradient would follow the sign of a rounding error, which depends on how sequences are split."""
    log_ratio_N = logprob_N - anchor_N
    ratio_N, chosen_N = log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp(), _chosen(columns)
    known_N = log_ratio_N.detach()
    size_N = known_N.abs() + (known_N / NOISE).clamp(-1.0, 1.0) * (log_ratio_N - known_N)
    loss_N = -columns.advantage_N * ratio_N + loss.covariance_kl_coef * (chosen_N * size_N)
    return PolicyLoss(loss_N, log_ratio_N.detach(), ratio_N.detach(), chosen_N)


def _chosen(columns: TokenColumns) -> Tensor:
    """Which tokens the loss treats as ones of high covariance (bool)."""
    assert columns.covariant_N is not None, "the loss's columns name it"
    chosen_N: Tensor = columns.covariant_N > 0
    return chosen_N


def _function(logprob_N: Tensor, anchor_N: Tensor, columns: TokenColumns, loss: FunctionLoss) -> PolicyLoss:
    """The user's own, with the metrics of a ratio that nothing clips."""
    loss_N = own_loss(loss.path, logprob_N, anchor_N, columns.advantage_N)
    log_ratio_N = (logprob_N - anchor_N).detach()
    ratio_N = log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return PolicyLoss(loss_N, log_ratio_N, ratio_N, torch.zeros_like(ratio_N, dtype=torch.bool))


def _mean_clipped_log_ratios(
    log_ratio_T: NDArray[np.float64], means: Callable[[NDArray[np.float64]], NDArray[np.float64]], loss: GmpoLoss
) -> dict[str, NDArray[np.float64]]:
    return {
        "log_ratio_up_B": means(np.minimum(log_ratio_T, loss.clip_high)),
        "log_ratio_down_B": means(np.maximum(log_ratio_T, -loss.clip_low)),
    }


@dataclass(frozen=True)
class LossFunction:
    """The mathematics of a loss table.

    `tokens`: (log-prob with gradient, that of the anchor, columns, table) → PolicyLoss. `sequences`, for a table with
    `sequence_columns`: (log-ratio to the anchor, 0 off the mask; function that makes means over each sequence's loss
    tokens of a value of each token, 0 where it has none; table) → these columns.
    """

    tokens: Callable[[Tensor, Tensor, TokenColumns, Any], PolicyLoss]
    sequences: Callable[..., Mapping[str, NDArray[np.float64]]] | None = None


LOSSES: Mapping[type[Loss], LossFunction] = {
    PpoClip: LossFunction(_ppo_clip),
    GspoLoss: LossFunction(_gspo, lambda log_ratio_T, means, _: {"log_ratio_B": means(log_ratio_T)}),
    CispoLoss: LossFunction(_cispo),
    SapoLoss: LossFunction(_sapo),
    FunctionLoss: LossFunction(_function),
    GmpoLoss: LossFunction(_gmpo, _mean_clipped_log_ratios),
    ClipCovLoss: LossFunction(_clip_cov),
    KlCovLoss: LossFunction(_kl_cov),
}


def sequence_columns(
    batch: Batch, loss: Loss, logprobs: Callable[[], NDArray[np.float32]]
) -> Mapping[str, NDArray[np.float64]]:
    """The loss's per-sequence columns. `logprobs` makes a pass without gradients; all ranks come here alike.

    Against the current log-probs every log-ratio is exactly 0, so the pass is spared.
    """
    function = LOSSES[type(loss)].sequences
    if function is None:
        return {}
    on_policy = loss.anchor == "current"
    ratio_T = np.zeros(batch.num_tokens) if on_policy else log_ratio_T(batch, loss, logprobs())
    tokens_B, sequence_T = batch.sum_by_sequence("loss_mask_T"), batch.sequence_T

    def means(value_T: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.bincount(sequence_T, value_T, len(tokens_B)) / np.maximum(tokens_B, 1)

    return function(ratio_T, means, loss)


def policy_loss(
    logprob_N: Tensor, entropy_N: Tensor, columns: TokenColumns, loss: Loss
) -> tuple[Tensor, Tensor, Tensor]:
    """Σ weight · (correction · the table's policy loss + kl_coef·KL - entropy_coef·entropy).

    Returns it (scalar, with gradient), the sums that the table declares, in the order of `loss.summed()`, and the
    maxima, in the order of `loss.maxima()`.
    """
    now_N = logprob_N.detach()
    trainer_N = now_N if columns.old_logprob_N is None else columns.old_logprob_N
    anchor_N = columns.rollout_logprob_N if loss.anchor == "sampler" else trainer_N
    policy = LOSSES[type(loss)].tokens(logprob_N, anchor_N, columns, loss)
    loss_N, kl_N = policy.loss_N, torch.zeros_like(now_N)
    if columns.correction_N is not None:
        loss_N = columns.correction_N * loss_N
    if columns.ref_logprob_N is not None:
        kl_N = kl_estimate(logprob_N, columns.ref_logprob_N, anchor_N, loss.kl_estimator)
        if loss.kl_coef:
            loss_N = loss_N + loss.kl_coef * kl_N
    if loss.entropy_coef:
        loss_N = loss_N - loss.entropy_coef * entropy_N
    weighted_N = columns.weight_N * loss_N
    tokens = TokenValues(
        loss_N=weighted_N.detach(),
        entropy_N=entropy_N.detach(),
        kl_N=kl_N.detach(),
        log_ratio_N=policy.log_ratio_N,
        ratio_N=policy.ratio_N,
        clipped_N=policy.clipped_N,
        trainer_logprob_N=trainer_N,
        rollout_logprob_N=columns.rollout_logprob_N,
    )
    sums = [value_N.sum().to(now_N.dtype) for value_N in token_values(loss.summed(), tokens)]
    maxima = [value_N.max() for value_N in token_values(loss.maxima(), tokens)]
    return weighted_N.sum(), torch.stack(sums), torch.stack(maxima)
