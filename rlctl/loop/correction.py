"""Off-policy correction: weights for samples that another policy drew than the one that learns, and what is logged of
the gap between the two. Pure numpy, on the driver. lr = log-prob of the trainer before the step - of the sampler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specs.schema.algorithms.algorithm import Anchor, Correction
from specs.schema.metric import Metric, metrics
from specs.wire.batch import Batch

MAX_LOG_RATIO = 20.0
MAX_EXCLUDED = 1e-3  # share of loss tokens whose log-prob may be no number; more is a broken model
PARTS = 4  # of samples by their length
Numbers = NDArray[np.float64]
METRICS: tuple[Metric, ...] = (
    *metrics(
        "with `algorithm.correction`",
        {
            "correction/weight_mean": "Mean weight of a loss token.",
            "correction/ess [share]": "Effective sample size of the weights; 1: all weigh the same.",
            "correction/not_finite [tokens]": "Left out because the trainer's log-prob is no number.",
        },
    ),
    Metric(
        name="correction/masked",
        unit="share",
        meaning="Loss tokens with weight 0.",
        when='with `algorithm.correction`, mode "mask"',
    ),
    Metric(
        name="correction/bounded",
        unit="share",
        meaning="Loss tokens whose weight is not their ratio but a bound.",
        when='with `algorithm.correction`, mode "clip" or "truncate"',
    ),
    *metrics(
        "log-probs of the trainer before the update are computed",
        {
            "rollout/ess [share]": "Effective sample size of the ratios trainer / sampler; 1: the two agree.",
            "rollout/kl_sampler_trainer [nats per token]": "Estimate of KL(sampler ‖ trainer) on the sampled tokens.",
            "rollout/kl_trainer_sampler [nats per token]": "Estimate of KL(trainer ‖ sampler) on the sampled tokens.",
            "rollout/logprob_gap_length_q<n> [nats]": "The gap of sampled tokens, of each quarter by length.",
        },
    ),
)


@dataclass(frozen=True)
class LogRatios:
    """lr of each loss token (N), and its sample."""

    lr_N: Numbers
    sample_N: NDArray[np.int64]
    at_N: NDArray[np.int64]  # where it stands in the batch's columns
    samples: int

    @staticmethod
    def of(batch: Batch) -> LogRatios:
        at_N = np.flatnonzero(batch["loss_mask_T"])
        lr_N = batch["old_logprob_T"][at_N].astype(np.float64) - batch["rollout_logprob_T"][at_N]
        return LogRatios(lr_N, batch.sequence_T[at_N], at_N, len(batch))

    def log_ratios(self, level: str) -> Numbers:
        """Each token's log-ratio: its own, its sample's sum, or (`geometric`) its sample's mean."""
        if level == "token":
            return self.lr_N
        of_B: Numbers = np.bincount(self.sample_N, self.lr_N, self.samples).astype(np.float64)
        if level == "geometric":
            of_B = of_B / np.maximum(np.bincount(self.sample_N, minlength=self.samples), 1)
        return np.asarray(of_B[self.sample_N], dtype=np.float64)


def correct(table: Correction, batch: Batch, anchor: Anchor) -> tuple[NDArray[np.float32], dict[str, float]]:
    """(`correction_T`: what the policy loss of each token is multiplied with, 0 off the loss mask; metrics).

    The ratio k is that of trainer over sampler: exp(lr) of a token, of the sum of a sample's or of their mean.
    `truncate`: min(k, high) (TIS, Yao et al. 2025). `clip`: k between low and high. `mask`: k between low and high,
    else 0 (IcePop, Ling team 2025; of whole samples MIS, Liu et al. 2025). Where the loss's own ratio is against the
    sampler it holds k already, and what the mask leaves weighs 1.
    """
    tokens = LogRatios.of(batch)
    ratio_N = np.exp(np.clip(tokens.log_ratios(table.level), -MAX_LOG_RATIO, MAX_LOG_RATIO))
    low, high = table.band
    if table.mode == "mask":
        kept_N = (ratio_N >= low) & (ratio_N <= high)
        weight_N = np.where(kept_N, 1.0 if anchor == "sampler" else ratio_N, 0.0)
        changed = {"correction/masked": _mean(~kept_N)}
    else:
        weight_N = np.clip(ratio_N, low if table.mode == "clip" else 0.0, high)
        changed = {"correction/bounded": _mean(weight_N != ratio_N)}
    column_T = np.zeros(batch.num_tokens, dtype=np.float32)
    column_T[tokens.at_N] = weight_N
    return column_T, {**changed, "correction/weight_mean": _mean(weight_N), "correction/ess": effective_share(weight_N)}


def effective_share(weight_N: Numbers) -> float:
    """Effective sample size (Kish 1965) as a share of the tokens: (Σw)² / (N·Σw²). 1: all weigh the same."""
    squares = float(weight_N @ weight_N)
    return float(weight_N.sum()) ** 2 / (len(weight_N) * squares) if squares else 0.0


def diagnostics(batch: Batch) -> dict[str, float]:
    """How far the trainer before the step is from the sampler, on the tokens that the sampler drew; nothing where the
    batch does not have the log-probs of both.

    With k = exp(lr): KL(sampler ‖ trainer) = E[k - 1 - lr] and KL(trainer ‖ sampler) = E[k·lr - k + 1]. The effective
    sample size is that of the weights k. The gap by length: mean |lr| of each quarter of the samples, the shortest
    first.
    """
    if "old_logprob_T" not in batch:
        return {}
    tokens = LogRatios.of(batch)
    lr_N = np.clip(tokens.lr_N, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio_N = np.exp(lr_N)
    found = {
        "rollout/ess": effective_share(ratio_N),
        "rollout/kl_sampler_trainer": _mean(ratio_N - 1.0 - lr_N),
        "rollout/kl_trainer_sampler": _mean(ratio_N * lr_N - ratio_N + 1.0),
    }
    count_B = np.bincount(tokens.sample_N, minlength=tokens.samples)
    gap_B = np.bincount(tokens.sample_N, np.abs(tokens.lr_N), tokens.samples)
    order = np.argsort(count_B, kind="stable")
    for number, part in enumerate(np.array_split(order[count_B[order] > 0], PARTS), 1):
        if len(part):
            found[f"rollout/logprob_gap_length_q{number}"] = float(gap_B[part].sum() / count_B[part].sum())
    return found


def without_non_numbers(batch: Batch) -> tuple[Batch, int]:
    """The batch with loss tokens whose `old_logprob_T` is not finite taken off the loss mask, so that they count
    nowhere, and how many they are. Where they are more than one in a thousand, the batch as it is."""
    mask_T = batch["loss_mask_T"] > 0
    bad_T = mask_T & ~np.isfinite(batch["old_logprob_T"])
    count = int(bad_T.sum())
    if not 0 < count <= MAX_EXCLUDED * mask_T.sum():
        return batch, 0
    left_T = np.where(bad_T, 0, batch["loss_mask_T"]).astype(batch["loss_mask_T"].dtype)
    return Batch({**batch.columns, "loss_mask_T": left_T}), count


def _mean(value_N: NDArray[Any]) -> float:
    return float(value_N.mean()) if len(value_N) else 0.0
