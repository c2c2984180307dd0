"""Credit each turn of an episode with the rewards that come after it, instead of with all of them.

A reward stands at the last token of its turn, and advantages of single tokens sum what comes after a token. There is no
baseline by the number of a turn: how many turns a rollout has follows from what it did, so such a baseline is biased.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from specs.wire.batch import Batch


def by_turn(
    batch: Batch, score_B: NDArray[np.float32], weight: float, penalty_T: NDArray[Any] | None
) -> tuple[NDArray[np.float32], NDArray[Any]]:
    """Return what of each sample's score comes at its end, and the penalty of each token, less what its turn earned.
    `weight`: of the environment's reward in the score.

    A rollout's samples follow each other, in the order of their ids: what an earlier one has earned is not credited to
    a later one. Rewards of turns that are not learned from stay in the score.
    """
    earned_T = weight * batch["turn_reward_T"].astype(np.float64) * (batch["loss_mask_T"] > 0)
    earned_B = np.add.reduceat(earned_T, batch.offsets[:-1]) if len(batch) else np.zeros(0)
    so_far: dict[int, float] = {}
    left_B = score_B.astype(np.float64)
    rollouts = batch["rollout_B"].tolist()
    for index in np.argsort(batch["id_B"], kind="stable").tolist():
        so_far[rollouts[index]] = so_far.get(rollouts[index], 0.0) + earned_B[index]
        left_B[index] -= so_far[rollouts[index]]
    return left_B.astype(np.float32), (0.0 if penalty_T is None else penalty_T) - earned_T
