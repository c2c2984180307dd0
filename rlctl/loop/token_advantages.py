"""Advantages of single tokens: pure numpy, on the driver. `TOKEN_ADVANTAGES` has a function for each such table.

They see the loss tokens alone, sample after sample, so nothing is lost or counted at a tool's tokens in between; and
some samples at a time, so that what is computed on the way stays in a core's cache.
N: loss tokens of samples whose grading worked. S: samples that have some.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from specs.schema.algorithms.algorithm import Advantage
from specs.schema.algorithms.algorithm_tables import Gae, GreedyBaseline, ReturnToGo, Teacher
from specs.wire.batch import Batch

WHITEN_EPS = 1e-8
TOKENS_AT_ONCE = 1 << 16
MAX_ROW = 64
Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class LossTokens:
    """Loss tokens of some samples, in order."""

    reward_N: Numbers  # the sample's score at its last loss token, less the penalty at each
    length_S: NDArray[np.int64]  # loss tokens of each
    column: Mapping[str, Numbers]  # those that the table reads, by their names in the batch

    def sums(self, *discounts: float | Numbers) -> list[Numbers]:
        """`decayed_sums` of the rewards."""
        return decayed_sums(self.reward_N, self.length_S, *discounts)


@dataclass(frozen=True)
class TokenAdvantages:
    """Hold what a table estimates at each loss token. `return_N`: what a critic should have said there. `centred_N`:
    what the advantage has besides, less its mean over the step. `whiten`: over the step."""

    advantage_N: Numbers
    return_N: Numbers | None = None
    centred_N: Numbers | None = None
    whiten: bool = False


def token_columns(
    table: Advantage,
    batch: Batch,
    score_B: NDArray[Any],
    valid_B: NDArray[np.bool_],
    penalty_T: NDArray[Any] | None = None,
) -> dict[str, NDArray[np.float32]]:
    """The table's estimate as columns of the batch, `advantage_T` and, of a table that has it, `return_T`; 0 where
    nothing counts."""
    counts_T = batch["loss_mask_T"] > 0
    if not valid_B.all():
        counts_T &= np.repeat(valid_B, batch["length_B"])
    slices = list(_some_samples(batch))
    parts = [
        TOKEN_ADVANTAGES[type(table)](table, _loss_tokens(table, batch, score_B, counts_T, penalty_T, samples, at))
        for samples, at in slices
    ]
    found: dict[str, Sequence[Numbers | None]] = {"advantage_T": _over_the_step(parts)}
    if parts[0].return_N is not None:
        found["return_T"] = [part.return_N for part in parts]
    columns = {name: np.zeros(batch.num_tokens, dtype=np.float32) for name in found}
    for name, values in found.items():
        for (_, at), value_N in zip(slices, values, strict=True):
            columns[name][at][counts_T[at]] = value_N
    return columns


def _some_samples(batch: Batch) -> Iterator[tuple[slice, slice]]:
    """Which samples, and their tokens: as many as begin within so many tokens."""
    offsets = batch.offsets
    cuts = np.flatnonzero(np.diff(offsets[:-1] // TOKENS_AT_ONCE)) + 1
    for start, stop in zip([0, *cuts], [*cuts, len(batch)], strict=True):
        yield slice(start, stop), slice(offsets[start], offsets[stop])


def _loss_tokens(
    table: Advantage,
    batch: Batch,
    score_B: NDArray[Any],
    counts_T: NDArray[np.bool_],
    penalty_T: NDArray[Any] | None,
    samples: slice,
    at: slice,
) -> LossTokens:
    counts = counts_T[at]
    ends_B = np.cumsum(batch["length_B"][samples])
    length_B = np.diff(np.searchsorted(np.flatnonzero(counts), ends_B), prepend=0)
    some_B = length_B > 0
    length_S = length_B[some_B]
    reward_N = np.zeros(length_S.sum()) if penalty_T is None else -penalty_T[at][counts].astype(np.float64)
    reward_N[np.cumsum(length_S) - 1] += score_B[samples][some_B]

    def column_N(name: str) -> Numbers:
        if name.endswith("_T"):
            return np.asarray(batch[name][at][counts], dtype=np.float64)
        return np.repeat(batch[name][samples][some_B].astype(np.float64), length_S)

    return LossTokens(reward_N, length_S, {name: column_N(name) for name in table.columns})


def _over_the_step(parts: Sequence[TokenAdvantages]) -> Sequence[Numbers]:
    """Advantages, of which some have a mean or a deviation that is the whole step's."""
    advantages = [part.advantage_N for part in parts]
    count = sum(map(len, advantages))
    centred = [part.centred_N for part in parts if part.centred_N is not None]
    if centred and count:
        mean = sum(float(value_N.sum()) for value_N in centred) / count
        advantages = [own_N + (value_N - mean) for own_N, value_N in zip(advantages, centred, strict=True)]
    if parts[0].whiten:
        _whiten(advantages, count)
    return advantages


def _whiten(values: Sequence[Numbers], count: int) -> None:
    """Mean 0 and unbiased variance 1 (+ 1e-8); 0 where there is nothing to whiten. In place."""
    mean = sum(float(value_N.sum()) for value_N in values) / max(count, 1)
    squares = 0.0
    for value_N in values:
        value_N -= mean
        squares += float(np.square(value_N).sum())  # a dot product of BLAS would wait for other threads
    deviation = np.sqrt(squares / (count - 1) + WHITEN_EPS) if count > 1 else np.inf
    for value_N in values:
        value_N /= deviation


def decayed_sums(value_N: Numbers, length_S: NDArray[np.int64], *decays: float | Numbers) -> list[Numbers]:
    """For each of `decays`, a number or one of each sample: sum[i] = value[i] + decay · sum[i + 1] within a sample,
    from its end. Rows of tokens go back side by side: numpy is called for each place in a row, not for each token."""
    if length_S.max(initial=0) <= 1:
        return [value_N.copy() for _ in decays]
    rows = Rows.of(value_N, length_S)
    return [rows.decayed_sums(np.broadcast_to(np.float64(decay), length_S.shape)) for decay in decays]


@dataclass(frozen=True)
class Rows:
    """Samples split from their ends into rows of W tokens, R rows in all, the last row first.

    A sample's first row may begin in the samples before it. What it makes of their tokens is handed on to nobody, and
    is overwritten when rows are written back in their order.
    """

    rows_S: NDArray[np.int64]  # of each sample
    start_R: NDArray[np.int64]  # where W zeros stand before the first token
    value_WR: Numbers

    @staticmethod
    def of(value_N: Numbers, length_S: NDArray[np.int64]) -> Rows:
        width = min(max(1 << (len(value_N) // len(length_S)).bit_length(), 2), MAX_ROW)
        rows_S = -(-length_S // width)
        nth_R = np.repeat(np.cumsum(rows_S), rows_S) - np.arange(rows_S.sum())  # counted from the sample's end
        start_R = (np.repeat(np.cumsum(length_S), rows_S) - (nth_R - 1) * width)[::-1]
        windows = sliding_window_view(np.concatenate([np.zeros(width), value_N]), width)
        return Rows(rows_S, start_R, windows[start_R].T.copy())

    def decayed_sums(self, decay_S: Numbers) -> Numbers:
        decay_R = np.repeat(decay_S, self.rows_S)[::-1].copy()
        behind_R = self._handed_on(decay_R)
        sum_WR = np.empty_like(self.value_WR)
        for value_R, sum_R in zip(self.value_WR[::-1], sum_WR[::-1], strict=True):
            np.multiply(decay_R, behind_R, out=sum_R)
            sum_R += value_R
            behind_R = sum_R
        width = len(sum_WR)
        sum_N = np.empty(self.start_R[0] + width)
        sliding_window_view(sum_N, width, writeable=True)[self.start_R] = sum_WR.T.copy()
        return sum_N[width:]

    def _handed_on(self, decay_R: Numbers) -> Numbers:
        """Return what each row gets from the one behind it in its sample."""
        if self.rows_S.max() == 1:
            return np.zeros_like(decay_R)
        alone_R = self.value_WR[-1].copy()
        for value_R in self.value_WR[-2::-1]:
            alone_R *= decay_R
            alone_R += value_R
        last_R = np.zeros(len(alone_R), dtype=bool)
        last_R[len(last_R) - np.cumsum(self.rows_S)] = True
        behind, carried = [], 0.0
        rows = zip(alone_R.tolist(), (decay_R ** len(self.value_WR)).tolist(), last_R.tolist(), strict=True)
        for alone, decay, last in rows:
            behind.append(0.0 if last else carried)
            carried = alone + decay * behind[-1]
        return np.array(behind)


# ── the advantages, by table ──────────────────────────────────────────────────────────────────────


def _return_to_go(table: ReturnToGo, tokens: LossTokens) -> TokenAdvantages:
    """Σ γ^k · reward of the k-th token from here, whitened over all loss tokens (Hu et al. 2025, eq. 5 and 6)."""
    (return_N,) = tokens.sums(table.discount)
    return TokenAdvantages(return_N, whiten=True)


def _gae(table: Gae, tokens: LossTokens) -> TokenAdvantages:
    """Σ (γλ)^k · δ of the k-th token from here, δ = reward + γ · V of the next loss token - V (Schulman et al. 2015,
    eq. 16), nothing behind a sample's last one. Returns are advantages with the critic's own λ, plus V (Yuan et al.
    2025); before whitening. With `gae_length_alpha`: λ = 1 - 1/(α · loss tokens of the sample) (Yue et al. 2025)."""
    value_N = tokens.column["value_T"]
    delta_N = np.zeros_like(value_N)
    np.multiply(value_N[1:], table.discount, out=delta_N[:-1])
    delta_N[np.cumsum(tokens.length_S) - 1] = 0.0
    delta_N += tokens.reward_N
    delta_N -= value_N
    lambdas: list[float | Numbers] = [table.lambda_value]
    if table.gae_length_alpha is not None:
        lambdas.append(np.maximum(1 - 1 / (table.gae_length_alpha * tokens.length_S), 0.0))
    elif table.gae_lambda != table.lambda_value:
        lambdas.append(table.gae_lambda)
    by_lambda = decayed_sums(delta_N, tokens.length_S, *(table.discount * one for one in lambdas))
    return TokenAdvantages(by_lambda[-1], by_lambda[0] + value_N, whiten=table.whiten)


def _greedy_baseline(table: GreedyBaseline, tokens: LossTokens) -> TokenAdvantages:
    """Σ γ^k · reward of the k-th token from here, minus the greedy completion's score (Li et al. 2023, eq. 6)."""
    (return_N,) = tokens.sums(table.discount)
    return TokenAdvantages(return_N - tokens.column["baseline_B"])


def _teacher(table: Teacher, tokens: LossTokens) -> TokenAdvantages:
    """ref - old at each token (Lu et al. 2025), and with `reward_coef` that much of the return less its mean."""
    advantage_N = tokens.column["ref_logprob_T"] - tokens.column["old_logprob_T"]
    centred_N = table.reward_coef * tokens.sums(1.0)[0] if table.reward_coef else None
    return TokenAdvantages(advantage_N, centred_N=centred_N, whiten=table.whiten)


TOKEN_ADVANTAGES: Mapping[type[Advantage], Callable[[Any, LossTokens], TokenAdvantages]] = {
    ReturnToGo: _return_to_go,
    Gae: _gae,
    GreedyBaseline: _greedy_baseline,
    Teacher: _teacher,
}
