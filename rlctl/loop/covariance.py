"""Tokens of high covariance, whose updates cost a policy most of its entropy (Cui et al. 2025). Pure numpy, on the
driver. N: loss tokens of a mini-batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specs.schema.algorithms.algorithm import Loss
from specs.schema.algorithms.algorithm_tables import ClipCovLoss, KlCovLoss
from specs.wire.batch import Batch

Numbers = NDArray[np.float64]


def with_selection(loss: Loss, mini: Batch, seed: tuple[int, ...]) -> Batch:
    """The mini-batch with `covariant_T`, 1 at the tokens that the loss treats in a way of its own, for a loss that has
    such. `seed`: of what is drawn at random.

    A token's covariance is (lp - mean lp)·(A - mean A), means over all loss tokens of the mini-batch (eq. 10). The
    paper takes lp of the policy that learns; here it is that of the trainer before the step's first update, or, where
    the ratio is not against it, of the sampler, which are known before any rank computes. In a step's first mini-batch
    the trainer is the policy that learns, and the choice is the paper's; in later ones it has learned since.
    """
    if not loss.selects_covariant:
        return mini
    at_N = np.flatnonzero(mini["loss_mask_T"])
    column_T = np.zeros(mini.num_tokens, dtype=np.float32)
    if len(at_N):
        logprob = "old_logprob_T" if loss.anchor == "trainer" else "rollout_logprob_T"
        covariance_N = covariances(mini[logprob][at_N], mini["advantage_T"][at_N])
        column_T[at_N[SELECTIONS[type(loss)](loss, covariance_N, np.random.default_rng(seed))]] = 1.0
    return mini.with_columns(covariant_T=column_T)


def covariances(logprob_N: NDArray[Any], advantage_N: NDArray[Any]) -> Numbers:
    """Each token's part of the covariance of the two."""
    logprob_N, advantage_N = logprob_N.astype(np.float64), advantage_N.astype(np.float64)
    return np.asarray((logprob_N - logprob_N.mean()) * (advantage_N - advantage_N.mean()))


def _in_band(loss: ClipCovLoss, covariance_N: Numbers, rng: np.random.Generator) -> NDArray[np.int64]:
    """Drawn evenly from those between the bounds, as many as the share is of all tokens (eq. 11)."""
    (inside,) = np.nonzero((covariance_N >= loss.covariance_low) & (covariance_N <= loss.covariance_high))
    return rng.choice(inside, min(_count(loss.covariance_share, covariance_N), len(inside)), replace=False)


def _largest(loss: KlCovLoss, covariance_N: Numbers, rng: np.random.Generator) -> NDArray[np.int64]:
    """The tokens with the largest (eq. 13); of equal ones the first."""
    return np.argsort(-covariance_N, kind="stable")[: _count(loss.covariance_share, covariance_N)]


def _count(share: float, covariance_N: Numbers) -> int:
    return max(1, int(share * len(covariance_N)))


SELECTIONS: Mapping[type[Loss], Callable[[Any, Numbers, np.random.Generator], NDArray[np.int64]]] = {
    ClipCovLoss: _in_band,
    KlCovLoss: _largest,
}
