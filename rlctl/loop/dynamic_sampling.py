"""Dynamic sampling (DAPO, Yu et al. 2025, §3.2): groups whose scores are all equal teach nothing. They are thrown away,
and prompts are drawn in their place."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlctl.loop.rollouts import GradedGroups, first_valid
from rlctl.loop.sampling import Drawn, Scored, Thrown


def signal_of(group_B: NDArray[Any], rollout_B: NDArray[Any], scored: Scored) -> NDArray[np.bool_]:
    """For each sample, whether the graded rollouts of its group differ in score."""
    groups = GradedGroups.of(group_B, rollout_B, scored.reward_B, scored.scored_B)
    return np.isin(group_B, groups.group_G[groups.differ_G])


def missing_groups(drawn: Drawn, wanted: int) -> int:
    """How many groups with signal are to be drawn yet."""
    group_B = drawn.batch["group_B"]
    return max(wanted - len(np.unique(group_B[signal_of(group_B, drawn.batch["rollout_B"], drawn.scored)])), 0)


def with_signal(drawn: Drawn, least: int, refills: int) -> Drawn:
    """The groups with signal; where they are fewer than `least`, the first of the others too, so that no mini-batch is
    empty."""
    group_B, rollout_B = drawn.batch["group_B"], drawn.batch["rollout_B"]
    signal_B = signal_of(group_B, rollout_B, drawn.scored)
    groups = len(np.unique(group_B[signal_B]))
    silent = np.unique(group_B[~signal_B])
    gone_B = np.isin(group_B, silent[max(least - groups, 0) :])
    chosen, gone = np.flatnonzero(~gone_B), np.flatnonzero(gone_B)
    first_R = first_valid(rollout_B, gone_B & drawn.scored.scored_B)
    term_R = {name: column[first_R].tolist() for name, column in drawn.scored.term_B.items()}
    thrown = Thrown(refills, len(np.unique(group_B[gone])), groups, drawn.scored.reward_B[first_R].tolist(), term_R)
    return Drawn(drawn.batch.select(chosen), replace(drawn.scored.select(chosen), thrown=thrown))
