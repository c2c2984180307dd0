"""From samples to rollouts: a rollout is one attempt at a task, and what is said of attempts counts each once, however
many samples it left. R: rollouts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specs.wire.batch import Batch


@dataclass(frozen=True)
class Rollouts:
    """The rollouts of some samples, in the order in which they first appear.

    rollout_B [7, 7, 4, 7] → first_R [0, 2], index_B [0, 0, 1, 0]
    """

    first_R: NDArray[np.int64]  # the first sample of each
    index_B: NDArray[np.int64]  # which rollout a sample belongs to, counted from 0

    @staticmethod
    def of(rollout_B: NDArray[Any]) -> Rollouts:
        _, first_R, index_B = np.unique(rollout_B, return_index=True, return_inverse=True)
        order = np.argsort(first_R, kind="stable")
        return Rollouts(first_R[order], np.argsort(order, kind="stable")[index_B])

    def sums(self, value_B: NDArray[np.int64]) -> NDArray[np.int64]:
        """A rollout's tokens are those of all its samples."""
        sum_R = np.zeros(len(self.first_R), dtype=value_B.dtype)
        np.add.at(sum_R, self.index_B, value_B)
        return sum_R

    def all(self, holds_B: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """A rollout is finished when each of its samples is."""
        all_R = np.ones(len(self.first_R), dtype=bool)
        np.logical_and.at(all_R, self.index_B, holds_B)
        return all_R


@dataclass(frozen=True)
class GradedGroups:
    """The groups of some samples (G, ascending): how many of their rollouts could be graded, and whether the scores of
    those differ."""

    group_G: NDArray[np.int64]
    rollouts_G: NDArray[np.int64]
    differ_G: NDArray[np.bool_]

    @staticmethod
    def of(
        group_B: NDArray[Any], rollout_B: NDArray[Any], score_B: NDArray[Any], valid_B: NDArray[np.bool_]
    ) -> GradedGroups:
        group_G, index_B = np.unique(group_B, return_inverse=True)
        first_R = first_valid(rollout_B, valid_B)
        index_R, score_R = index_B[first_R], score_B[first_R]
        low_G, high_G = np.full(len(group_G), np.inf), np.full(len(group_G), -np.inf)
        np.minimum.at(low_G, index_R, score_R)
        np.maximum.at(high_G, index_R, score_R)
        return GradedGroups(group_G, np.bincount(index_R, minlength=len(group_G)), low_G < high_G)


def without_truncated(batch: Batch) -> Batch:
    """The batch with rollouts that were truncated wholly off the loss mask."""
    rollouts = Rollouts.of(batch["rollout_B"])
    finished_B = rollouts.all(batch["finished_B"] != 0)[rollouts.index_B]
    mask_T = batch["loss_mask_T"]
    left_T = np.where(np.repeat(finished_B, batch["length_B"]), mask_T, 0).astype(mask_T.dtype)
    return Batch({**batch.columns, "loss_mask_T": left_T})


def first_valid(rollout_B: NDArray[Any], valid_B: NDArray[np.bool_]) -> NDArray[np.int64]:
    """The first valid sample of each rollout that has one: its score is the rollout's."""
    valid = np.flatnonzero(valid_B)
    return valid[Rollouts.of(rollout_B[valid]).first_R]
