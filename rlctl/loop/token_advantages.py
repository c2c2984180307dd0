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
Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class LossTokens:
    """Loss tokens, in order."""

    reward_N: Numbers  # the sample's score at its last loss token, less the penalty at each
    last_N: NDArray[np.bool_]  # of its sample
    column: Mapping[str, Numbers]  # those that the table reads, by their names in the batch
    at_N: NDArray[np.int64]  # where they stand in the batch's columns
    total: int  # tokens of the batch

    @property
    def length_S(self) -> NDArray[np.int64]:
        """Loss tokens of each sample that has some."""
        return np.diff(np.flatnonzero(self.last_N), prepend=-1)

    @staticmethod
    def of(
        table: Advantage,
        batch: Batch,
        score_B: NDArray[Any],
        valid_B: NDArray[np.bool_],
        penalty_T: NDArray[Any] | None = None,
    ) -> LossTokens:
        counts_T = (batch["loss_mask_T"] > 0) & np.repeat(valid_B, batch["length_B"])
        at_N = np.flatnonzero(counts_T)
        sample_N = batch.sequence_T[at_N]
        last_N = np.ones(len(at_N), dtype=bool)
        last_N[:-1] = sample_N[:-1] != sample_N[1:]
        reward_N = np.zeros(len(at_N)) if penalty_T is None else -penalty_T[at_N].astype(np.float64)
        reward_N[last_N] += score_B[sample_N[last_N]]
        index = {"_T": at_N, "_B": sample_N}
        column = {name: batch[name][index[name[-2:]]].astype(np.float64) for name in table.columns}
        return LossTokens(reward_N, last_N, column, at_N, batch.num_tokens)

    def spread(self, estimate: TokenAdvantages) -> dict[str, NDArray[np.float32]]:
        """The estimate as columns of the batch, 0 at all other tokens."""
        found = {"advantage_T": estimate.advantage_N, "return_T": estimate.return_N}
        columns = {}
        for name, value_N in found.items():
            if value_N is not None:
                columns[name] = np.zeros(self.total, dtype=np.float32)
                columns[name][self.at_N] = value_N
        return columns


@dataclass(frozen=True)
class TokenAdvantages:
    """What a table estimates at each loss token. `return_N`: what a critic should have said there."""

    advantage_N: Numbers
    return_N: Numbers | None = None


def decayed_sums(value_N: Numbers, decay_N: Numbers) -> Numbers:
    """sum[i] = value[i] + decay[i] · sum[i + 1], from the end. A decay of 0 begins anew.

    Rows of √N tokens go back side by side, then each gets what lies behind it: 2√N steps of numpy and Python instead of
    N.
    """
    count = len(value_N)
    width = math.isqrt(max(count - 1, 0)) + 1
    rows = -(-count // width)
    sum_WR, decay_WR = np.zeros((width, rows)), np.zeros((width, rows))
    for out_WR, given_N in ((sum_WR, value_N), (decay_WR, decay_N)):
        padded_N = np.zeros(rows * width)
        padded_N[:count] = given_N
        out_WR[:] = padded_N.reshape(rows, width).T
    for column in range(width - 2, -1, -1):
        sum_WR[column] += decay_WR[column] * sum_WR[column + 1]
        decay_WR[column] *= decay_WR[column + 1]  # of a whole row: what it hands on from the next
    behind_R, carried = np.zeros(rows), 0.0
    row_sums, row_decays = (of_WR[:1].reshape(-1).tolist() for of_WR in (sum_WR, decay_WR))
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
    centred_N = value_N - value_N.mean()
    return np.asarray(centred_N / np.sqrt(centred_N @ centred_N / (len(value_N) - 1) + WHITEN_EPS))


# ── the advantages, by table ──────────────────────────────────────────────────────────────────────


def _return_to_go(table: ReturnToGo, tokens: LossTokens) -> TokenAdvantages:
    """Σ γ^k · reward of the k-th token from here, whitened over all loss tokens (Hu et al. 2025, eq. 5 and 6)."""
    return_N = decayed_sums(tokens.reward_N, np.where(tokens.last_N, 0.0, table.discount))
    return TokenAdvantages(whitened(return_N))


def _gae(table: Gae, tokens: LossTokens) -> TokenAdvantages:
    """Σ (γλ)^k · δ of the k-th token from here, δ = reward + γ · V of the next loss token - V (Schulman et al. 2015,
    eq. 16), nothing behind a sample's last one. Returns are advantages with the critic's own λ, plus V (Yuan et al.
    2025); before whitening. With `gae_length_alpha`: λ = 1 - 1/(α · loss tokens of the sample) (Yue et al. 2025)."""
    value_N, discount_N = tokens.column["value_T"], np.where(tokens.last_N, 0.0, table.discount)
    delta_N = tokens.reward_N - value_N
    delta_N[:-1] += discount_N[:-1] * value_N[1:]
    by_critic_N = decayed_sums(delta_N, discount_N * table.lambda_value)
    if table.gae_length_alpha is not None:
        lambda_S = np.maximum(1 - 1 / (table.gae_length_alpha * tokens.length_S), 0.0)
        advantage_N = decayed_sums(delta_N, discount_N * np.repeat(lambda_S, tokens.length_S))
    elif table.lambda_value == table.gae_lambda:
        advantage_N = by_critic_N
    else:
        advantage_N = decayed_sums(delta_N, discount_N * table.gae_lambda)
    return TokenAdvantages(whitened(advantage_N) if table.whiten else advantage_N, by_critic_N + value_N)


def _greedy_baseline(table: GreedyBaseline, tokens: LossTokens) -> TokenAdvantages:
    """Σ γ^k · reward of the k-th token from here, minus the greedy completion's score (Li et al. 2023, eq. 6)."""
    return_N = decayed_sums(tokens.reward_N, np.where(tokens.last_N, 0.0, table.discount))
    return TokenAdvantages(return_N - tokens.column["baseline_B"])


def _teacher(table: Teacher, tokens: LossTokens) -> TokenAdvantages:
    """ref - old at each token (Lu et al. 2025), and with `reward_coef` that much of the return less its mean."""
    advantage_N = tokens.column["ref_logprob_T"] - tokens.column["old_logprob_T"]
    if table.reward_coef and len(advantage_N):
        return_N = decayed_sums(tokens.reward_N, np.where(tokens.last_N, 0.0, 1.0))
        advantage_N = advantage_N + table.reward_coef * (return_N - return_N.mean())
    return TokenAdvantages(whitened(advantage_N) if table.whiten else advantage_N)


TOKEN_ADVANTAGES: Mapping[type[Advantage], Callable[[Any, LossTokens], TokenAdvantages]] = {
    ReturnToGo: _return_to_go,
    Gae: _gae,
    GreedyBaseline: _greedy_baseline,
    Teacher: _teacher,
}
