"""Advantages: pure numpy, on the driver. `ADVANTAGES` has a function for each table that gives all tokens of a rollout
the same advantage; those of single tokens are in `token_advantages.py`.

A rollout is one attempt at a task; its samples share its score, and it counts once. R: rollouts, G: groups.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlctl.loop.rollouts import Rollouts
from rlctl.loop.token_advantages import TOKEN_ADVANTAGES, WHITEN_EPS, token_columns
from specs.errors import RlctlError
from specs.own_function import own_advantage
from specs.schema.algorithms.algorithm import Advantage, FunctionAdvantage
from specs.schema.algorithms.algorithm_tables import GroupCentredWhitened, GroupRelative, LeaveOneOut, LengthWeighted
from specs.wire.batch import Batch

GROUP_EPS = 1e-6
Scores = NDArray[np.float64]


@dataclass(frozen=True)
class ScoredGroups:
    """Rollouts to compare: of each its score, its group (counted from 0), and its loss tokens."""

    score_R: Scores
    group_R: NDArray[np.int64]
    tokens_R: NDArray[np.int64]

    def group_mean_R(self, weight_R: NDArray[Any] | None = None) -> Scores:
        """Mean score of each rollout's group, weighted where `weight_R` is given; 0 where all weights are 0."""
        sum_G = np.bincount(self.group_R, self.score_R if weight_R is None else self.score_R * weight_R)
        weight_G = np.bincount(self.group_R, weight_R)
        return np.asarray((sum_G / np.where(weight_G == 0, 1, weight_G))[self.group_R], dtype=np.float64)


def columns(
    table: Advantage,
    batch: Batch,
    score_B: NDArray[np.float32],
    valid_B: NDArray[np.bool_],
    penalty_T: NDArray[Any] | None = None,
) -> dict[str, NDArray[np.float32]]:
    """`advantage_T`, and `return_T` where the table estimates it; 0 off the loss mask.

    The reward of a sample stands at its last loss token; `penalty_T` is taken off at every loss token, so that a
    rollout's score is what is left. Samples with `valid_B` false (aborted, or their grading failed) are left out of all
    statistics and get advantage 0, and the critic's own values as returns. Raises RlctlError for a table without a
    function.
    """
    if type(table) in TOKEN_ADVANTAGES:
        found = token_columns(table, batch, score_B, valid_B, penalty_T)
        if "return_T" in found and not valid_B.all():
            ungraded_T = (batch["loss_mask_T"] > 0) & ~np.repeat(valid_B, batch["length_B"])
            found["return_T"][ungraded_T] = batch["value_T"][ungraded_T]
        return found
    group_B, rollout_B = (batch[name].astype(np.int64) for name in ("group_B", "rollout_B"))
    left_B = score_B if penalty_T is None else _left_of(score_B, penalty_T, batch, rollout_B, valid_B)
    tokens_B = batch.sum_by_sequence("loss_mask_T")
    return {"advantage_T": per_token(advantages_of(table, left_B, group_B, rollout_B, valid_B, tokens_B), batch)}


def _left_of(
    score_B: NDArray[Any],
    penalty_T: NDArray[Any],
    batch: Batch,
    rollout_B: NDArray[np.int64],
    valid_B: NDArray[np.bool_],
) -> NDArray[np.float64]:
    """Scores less the penalties of all valid samples of the rollout."""
    sample_T = batch.sequence_T
    counts_T = (batch["loss_mask_T"] > 0) & valid_B[sample_T]
    penalty_B = np.bincount(sample_T[counts_T], penalty_T[counts_T], len(batch))
    index_B = Rollouts.of(rollout_B).index_B
    return np.asarray(score_B - np.bincount(index_B, penalty_B)[index_B])


def advantages_of(
    table: Advantage,
    score_B: NDArray[Any],
    group_B: NDArray[np.int64],
    rollout_B: NDArray[np.int64],
    valid_B: NDArray[np.bool_],
    tokens_B: NDArray[np.int64],
) -> NDArray[np.float32]:
    """Advantage of each sample, that of its rollout. `tokens_B`: loss tokens.

    A group with fewer valid rollouts than the table's `min_group` gets 0, as samples with `valid_B` false do.
    """
    if type(table) not in ADVANTAGES:
        known = ", ".join(str(one.model_fields["kind"].default) for one in (*ADVANTAGES, *TOKEN_ADVANTAGES))
        hint = f"ADVANTAGES in rlctl/loop/advantages.py and TOKEN_ADVANTAGES in token_advantages.py have {known}"
        raise RlctlError(f"no function for the advantage {table.model_dump()['kind']}", hint=hint)
    advantage_B = np.zeros(len(score_B), dtype=np.float64)
    rollouts = Rollouts.of(rollout_B[valid_B])
    if len(rollouts.first_R):
        _, group_R = np.unique(group_B[valid_B][rollouts.first_R], return_inverse=True)
        score_R = score_B[valid_B][rollouts.first_R].astype(np.float64)
        scored = ScoredGroups(score_R, group_R, rollouts.sums(tokens_B[valid_B].astype(np.int64)))
        advantage_R = ADVANTAGES[type(table)](table, scored)
        comparable_R = np.bincount(group_R)[group_R] >= table.min_group
        advantage_B[valid_B] = np.where(comparable_R, advantage_R, 0.0)[rollouts.index_B]
    return advantage_B.astype(np.float32)


# ── the advantages, by table ──────────────────────────────────────────────────────────────────────


def _group_relative(table: GroupRelative, scored: ScoredGroups) -> Scores:
    """Each score relative to its group's mean (Shao et al. 2024, §4.1), divided by (unbiased std + 1e-6): that of the
    group for `std`, of all rollouts of the step for `batch` (Lite PPO, Zihe Liu et al. 2025); not divided for `none`
    (Dr.GRPO, Zichen Liu et al. 2025)."""
    score_R, group_R = scored.score_R, scored.group_R
    centred_R = score_R - scored.group_mean_R()
    if table.scale == "none":
        return centred_R
    if table.scale == "batch":
        return centred_R / ((score_R.std(ddof=1) if len(score_R) > 1 else 0.0) + GROUP_EPS)
    variance_G = np.bincount(group_R, centred_R**2) / np.maximum(np.bincount(group_R) - 1, 1)
    return centred_R / (np.sqrt(variance_G) + GROUP_EPS)[group_R]


def _leave_one_out(table: LeaveOneOut, scored: ScoredGroups) -> Scores:
    """Each score minus the mean of the others in its group (Ahmadian et al. 2024, eq. 8)."""
    score_R, group_R = scored.score_R, scored.group_R
    others_R = np.bincount(group_R)[group_R] - 1
    sum_G = np.bincount(group_R, score_R)
    return score_R - (sum_G[group_R] - score_R) / np.maximum(others_R, 1)


def _length_weighted(table: LengthWeighted, scored: ScoredGroups) -> Scores:
    """Each score minus Σ length · score / Σ length of its group (Hao et al. 2025, eq. 5)."""
    return scored.score_R - scored.group_mean_R(scored.tokens_R)


def _group_centred_whitened(table: GroupCentredWhitened, scored: ScoredGroups) -> Scores:
    """Each score minus its group's mean, whitened over the step's loss tokens: their mean, and their unbiased variance
    + 1e-8 (Hu et al. 2025, eq. 9). Rollouts with nobody to compare with are left out. Nothing to whiten: 0."""
    comparable_R = np.bincount(scored.group_R)[scored.group_R] >= table.min_group
    centred_R, tokens_R = scored.score_R - scored.group_mean_R(), np.where(comparable_R, scored.tokens_R, 0)
    tokens = int(tokens_R.sum())
    if tokens < 2:
        return np.zeros_like(centred_R)
    mean = float(tokens_R @ centred_R) / tokens
    variance = float(tokens_R @ (centred_R - mean) ** 2) / (tokens - 1)
    return np.asarray((centred_R - mean) / np.sqrt(variance + WHITEN_EPS))


def _function(table: FunctionAdvantage, scored: ScoredGroups) -> Scores:
    return own_advantage(table.path, scored.score_R, scored.group_R, scored.tokens_R)


ADVANTAGES: Mapping[type[Advantage], Callable[[Any, ScoredGroups], Scores]] = {
    GroupRelative: _group_relative,
    LeaveOneOut: _leave_one_out,
    LengthWeighted: _length_weighted,
    GroupCentredWhitened: _group_centred_whitened,
    FunctionAdvantage: _function,
}


# ── for the step ──────────────────────────────────────────────────────────────────────────────────


def per_token(value_B: NDArray[np.float32], batch: Batch) -> NDArray[np.float32]:
    """A sequence's value at each of its loss tokens, 0 elsewhere."""
    mask_T = batch["loss_mask_T"].astype(np.float32)
    return np.repeat(value_B, batch["length_B"]).astype(np.float32) * mask_T
