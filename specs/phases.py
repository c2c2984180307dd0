"""The phases of a run: one word each for residency, clock, progress, memory plan and metrics.

rollout   sample completions and grade them
score     grade them by a reward model
train     log-probs before the update, forward and backward passes, optimizer steps
sync      weights from the actor to the rollout
save      write a checkpoint
build     start processes and build models
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

Phase = Literal["rollout", "score", "train", "sync", "save", "build"]

# The phases of a step → their metric, in the step's order. `rollout` is told without the wait for grades, to which
# `score` belongs.
TIME_METRICS: Mapping[Phase, str] = {"rollout": "time/rollout_s", "train": "time/update_s", "sync": "time/sync_s"}
GRADING_METRIC = "time/reward_s"  # every completion is here, its grade is not
