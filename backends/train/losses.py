"""Token losses of policy optimisation: pure functions of log-probs, one value per loss token (N).

A loss over a mini-batch is the sum of these, each times its weight (`backends/train/packing.py: loss_weight_T`), so it
does not depend on how tokens are split over micro-batches and ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specs.algorithms import Grpo

MAX_LOG_RATIO = 20.0  # exp of more overflows what a gradient can use
MAX_KL = 10.0


@dataclass(frozen=True)
class PolicyLoss:
    """`loss_N` carries gradient; `ratio_N` and `clipped_N` (bool: the clip decided) do not."""

    loss_N: Tensor
    ratio_N: Tensor
    clipped_N: Tensor


def clipped_policy_loss(
    logprob_N: Tensor,
    old_logprob_N: Tensor,
    advantage_N: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> PolicyLoss:
    """max(-Aρ, -A·clip(ρ, 1 - low, 1 + high)) with ρ = exp(logprob - old): PPO (Schulman et al. 2017, eq. 7).

    Separate bounds are DAPO's clip-higher (Yu et al. 2025, eq. 10). `dual_clip` c bounds the loss to -A·c where A < 0
    (Ye et al. 2020, eq. 5).
    """
    ratio_N = (logprob_N - old_logprob_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    plain_N = -advantage_N * ratio_N
    bounded_N = -advantage_N * ratio_N.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss_N = torch.maximum(plain_N, bounded_N)
    clipped_N = bounded_N > plain_N
    if dual_clip is not None:
        ceiling_N = -advantage_N * dual_clip
        over_N = (advantage_N < 0) & (loss_N > ceiling_N)
        loss_N = torch.where(over_N, ceiling_N, loss_N)
        clipped_N = clipped_N | over_N
    return PolicyLoss(loss_N, ratio_N.detach(), clipped_N.detach())


def kl_estimate(logprob_N: Tensor, ref_logprob_N: Tensor, estimator: str) -> Tensor:
    """Estimate of KL(actor ‖ ref) at each token sampled by the actor, from d = ref - logprob (Schulman 2020).

    k2: d²/2. k3: exp(d) - d - 1, with d clamped to ±20 inside the exponential and the whole to ±10.
    k3-straight-through: the value of k3 with the gradient of k2, which is the gradient of the true KL in expectation.
    """
    d_N = ref_logprob_N - logprob_N
    if estimator == "k2":
        return 0.5 * d_N.square()
    k3_N = (d_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp() - d_N - 1.0).clamp(-MAX_KL, MAX_KL)
    if estimator == "k3":
        return k3_N
    assert estimator == "k3-straight-through", estimator
    k2_N = 0.5 * d_N.square()
    return k3_N.detach() + k2_N - k2_N.detach()


@dataclass(frozen=True)
class TokenColumns:
    """What the loss reads at each loss token besides the model's own numbers."""

    weight_N: Tensor
    advantage_N: Tensor
    rollout_logprob_N: Tensor
    old_logprob_N: Tensor | None  # None: on-policy, the current ones
    ref_logprob_N: Tensor | None  # None: no KL term
    sampler_is_old: bool = False  # the ratio is taken against the sampler's log-probs: they are of older weights

    def slice(self, start: int, stop: int) -> TokenColumns:
        columns = (self.weight_N, self.advantage_N, self.rollout_logprob_N, self.old_logprob_N, self.ref_logprob_N)
        cut = (None if column is None else column[start:stop] for column in columns)
        return TokenColumns(*cut, sampler_is_old=self.sampler_is_old)  # type: ignore[arg-type]


# Order of the sums that `grpo_loss` returns; the maximum of the sampler's gap is returned beside them.
LOSS_SUMS = ("loss", "entropy", "kl", "clipped", "logprob_gap", "approx_kl", "ratio")


def grpo_loss(
    logprob_N: Tensor, entropy_N: Tensor, columns: TokenColumns, algorithm: Grpo
) -> tuple[Tensor, Tensor, Tensor]:
    """GRPO's loss (Shao et al. 2024, eq. 3): Σ weight · (clipped surrogate + kl_coef·KL - entropy_coef·entropy).

    Returns the loss (scalar, with gradient), sums [7] in the order of LOSS_SUMS, and the largest sampler gap (scalar).
    """
    now_N = logprob_N.detach()
    trainer_N = now_N if columns.old_logprob_N is None else columns.old_logprob_N
    old_N = columns.rollout_logprob_N if columns.sampler_is_old else trainer_N
    policy = clipped_policy_loss(
        logprob_N,
        old_N,
        columns.advantage_N,
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
        dual_clip=algorithm.dual_clip,
    )
    loss_N = policy.loss_N
    kl_sum = loss_N.new_zeros(())
    if columns.ref_logprob_N is not None:
        kl_N = kl_estimate(logprob_N, columns.ref_logprob_N, algorithm.kl_estimator)
        kl_sum = kl_N.detach().sum()
        if algorithm.kl_coef:
            loss_N = loss_N + algorithm.kl_coef * kl_N
    if algorithm.entropy_coef:
        loss_N = loss_N - algorithm.entropy_coef * entropy_N
    loss = (columns.weight_N * loss_N).sum()
    gap_N = (columns.rollout_logprob_N - trainer_N).abs()
    sums = torch.stack(
        [
            loss.detach(),
            entropy_N.detach().sum(),
            kl_sum,
            policy.clipped_N.sum().to(loss.dtype),
            gap_N.sum(),
            (policy.ratio_N - 1.0 - (now_N - old_N)).sum(),
            policy.ratio_N.sum(),
        ]
    )
    return loss, sums, gap_N.max()
