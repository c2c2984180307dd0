"""Advantages of single tokens: pure numpy, on the driver. `TOKEN_ADVANTAGES` has a function for each such table.

They see the loss tokens alone, sample after sample, so nothing is lost or counted at a tool's tokens in between.
N: loss tokens of the samples whose grading worked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specs.schema.algorithms.algorithm import Advantage
from specs.schema.algorithms.algorithm_tables import Gae, GreedyBaseline, ReturnToGo, Teacher
from specs.wire.batch import Batch

WHITEN_EPS = 1e-8
TOKENS_AT_ONCE = 1 << 16  # their decayed sums stay in a core's cache
Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class LossTokens:
    """Loss tokens, in order."""

    reward_N: Numbers  # the sample's score at its last loss token, less the penalty at each
    length_S: NDArray[np.int64]  # loss tokens of each sample that has some
    column: Mapping[str, Numbers]  # those that the table reads, by their names in the batch
    counts_T: NDArray[np.bool_]  # which of the batch's tokens they are

    def discounts(self, discount_S: float | Numbers) -> Numbers:
        """What the next token counts at each token, for all samples or for each; 0 at a sample's last."""
        discount_N = np.repeat(np.broadcast_to(discount_S, self.length_S.shape), self.length_S)
        discount_N[np.cumsum(self.length_S) - 1] = 0.0
        return discount_N

    @staticmethod
    def of(
        table: Advantage,
        batch: Batch,
        score_B: NDArray[Any],
        valid_B: NDArray[np.bool_],
        penalty_T: NDArray[Any] | None = None,
    ) -> LossTokens:
        counts_T = batch["loss_mask_T"] > 0
        if not valid_B.all():
            counts_T &= np.repeat(valid_B, batch["length_B"])
        length_B = np.diff(np.searchsorted(np.flatnonzero(counts_T), batch.offsets))
        some_B = length_B > 0
        length_S = length_B[some_B]
        reward_N = np.zeros(length_S.sum()) if penalty_T is None else -penalty_T[counts_T].astype(np.float64)
        reward_N[np.cumsum(length_S) - 1] += score_B[some_B]

        def column_N(name: str) -> Numbers:
            column = batch[name]
            value_N = column[counts_T] if name.endswith("_T") else np.repeat(column[some_B], length_S)
            return value_N.astype(np.float64)

        return LossTokens(reward_N, length_S, {name: column_N(name) for name in table.columns}, counts_T)

    def spread(self, estimate: TokenAdvantages) -> dict[str, NDArray[np.float32]]:
        """The estimate as columns of the batch, 0 at all other tokens."""
        found = {"advantage_T": estimate.advantage_N, "return_T": estimate.return_N}
        columns = {}
        for name, value_N in found.items():
            if value_N is not None:
                columns[name] = np.zeros(len(self.counts_T), dtype=np.float32)
                columns[name][self.counts_T] = value_N
        return columns


@dataclass(frozen=True)
class TokenAdvantages:
    """What a table estimates at each loss token. `return_N`: what a critic should have said there."""

    advantage_N: Numbers
    return_N: Numbers | None = None


def decayed_sums(value_N: Numbers, decay_N: Numbers) -> Numbers:
    """sum[i] = value[i] + decay[i] · sum[i + 1], from the end. A decay of 0 begins anew."""
    sum_N, behind = value_N.copy(), 0.0
    for stop in range(len(sum_N), 0, -TOKENS_AT_ONCE):
        part = slice(max(stop - TOKENS_AT_ONCE, 0), stop)
        sum_N[stop - 1] += decay_N[stop - 1] * behind
        sum_N[part] = _decayed_sums_at_once(sum_N[part], decay_N[part])
        behind = sum_N[part.start]
    return sum_N


def _decayed_sums_at_once(value_N: Numbers, decay_N: Numbers) -> Numbers:
    """Rows of about √N/2 tokens go back side by side, then each gets what lies behind it: 2.5√N steps of numpy and
    Python instead of N."""
    count = len(value_N)
    width = math.isqrt(count // 4) + 1
    whole = count // width
    rows = (whole + 1) | 1  # odd: values a power of two apart would share lines of the cache
    sum_WR, decay_WR = np.zeros((width, rows)), np.zeros((width, rows))
    for out_WR, given_N in ((sum_WR, value_N), (decay_WR, decay_N)):
        out_WR[:, :whole] = given_N[: whole * width].reshape(whole, width).T
        out_WR[: count - whole * width, whole] = given_N[whole * width :]
    sums, decays, handed_on_R = list(sum_WR), list(decay_WR), np.empty(rows)
    for column in range(width - 2, -1, -1):
        sums[column] += np.multiply(decays[column], sums[column + 1], out=handed_on_R)
        decays[column] *= decays[column + 1]  # of a whole row: what it hands on from the next
    behind_R, carried = np.zeros(rows), 0.0
    row_sums, row_decays = sums[0].tolist(), decays[0].tolist()
    for row in range(rows - 1, -1, -1):
        behind_R[row] = carried
        carried = row_sums[row] + row_decays[row] * carried
    decay_WR *= behind_R
    sum_WR += decay_WR
    return np.asarray(sum_WR.T.reshape(-1)[:count])


def whitened(value_N: Numbers) -> Numbers:
    """Mean 0 and unbiased variance 1 (+ 1e-8); 0 where there is nothing to whiten."""
    if len(value_N) < 2:
        return np.zeros_like(value_N)
    white_N = value_N - value_N.mean()
    white_N /= np.sqrt(white_N @ white_N / (len(value_N) - 1) + WHITEN_EPS)
    return np.asarray(white_N)


# ── the advantages, by table ──────────────────────────────────────────────────────────────────────


def _return_to_go(table: ReturnToGo, tokens: LossTokens) -> TokenAdvantages:
    """Σ γ^k · reward of the k-th token from here, whitened over all loss tokens (Hu et al. 2025, eq. 5 and 6)."""
    return_N = decayed_sums(tokens.reward_N, tokens.discounts(table.discount))
    return TokenAdvantages(whitened(return_N))


def _gae(table: Gae, tokens: LossTokens) -> TokenAdvantages:
    """Σ (γλ)^k · δ of the k-th token from here, δ = reward + γ · V of the next loss token - V (Schulman et al. 2015,
    eq. 16), nothing behind a sample's last one. Returns are advantages with the critic's own λ, plus V (Yuan et al.
    2025); before whitening. With `gae_length_alpha`: λ = 1 - 1/(α · loss tokens of the sample) (Yue et al. 2025)."""
    value_N = tokens.column["value_T"]
    delta_N = tokens.discounts(table.discount)
    delta_N[:-1] *= value_N[1:]
    delta_N += tokens.reward_N
    delta_N -= value_N
    by_critic_N = decayed_sums(delta_N, tokens.discounts(table.discount * table.lambda_value))
    if table.gae_length_alpha is not None:
        lambda_S = np.maximum(1 - 1 / (table.gae_length_alpha * tokens.length_S), 0.0)
        advantage_N = decayed_sums(delta_N, tokens.discounts(table.discount * lambda_S))
    elif table.lambda_value == table.gae_lambda:
        advantage_N = by_critic_N
    else:
        advantage_N = decayed_sums(delta_N, tokens.discounts(table.discount * table.gae_lambda))
    return TokenAdvantages(whitened(advantage_N) if table.whiten else advantage_N, by_critic_N + value_N)


def _greedy_baseline(table: GreedyBaseline, tokens: LossTokens) -> TokenAdvantages:
    """Σ γ^k · reward of the k-th token from here, minus the greedy completion's score (Li et al. 2023, eq. 6)."""
    return_N = decayed_sums(tokens.reward_N, tokens.discounts(table.discount))
    return TokenAdvantages(return_N - tokens.column["baseline_B"])


def _teacher(table: Teacher, tokens: LossTokens) -> TokenAdvantages:
    """ref - old at each token (Lu et al. 2025), and with `reward_coef` that much of the return less its mean."""
    advantage_N = tokens.column["ref_logprob_T"] - tokens.column["old_logprob_T"]
    if table.reward_coef and len(advantage_N):
        return_N = decayed_sums(tokens.reward_N, tokens.discounts(1.0))
        advantage_N = advantage_N + table.reward_coef * (return_N - return_N.mean())
    return TokenAdvantages(whitened(advantage_N) if table.whiten else advantage_N)


TOKEN_ADVANTAGES: Mapping[type[Advantage], Callable[[Any, LossTokens], TokenAdvantages]] = {
    ReturnToGo: _return_to_go,
    Gae: _gae,
    GreedyBaseline: _greedy_baseline,
    Teacher: _teacher,
}
