"""The reward model: it gives each sequence, in its own tokens, one score, and learns it from pairs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from backends.protocol import Rank
from specs.schema.roles import REWARD_MODEL, RoleName
from specs.wire.messages import Verb
from workers.roles.score_learner import ScoreLearner
from workers.serve import Handler


class RewardModel(ScoreLearner):
    """A rank of the reward model."""

    role: ClassVar[RoleName] = REWARD_MODEL


def handlers(rank: Rank) -> Mapping[Verb, Handler]:
    return RewardModel(rank).handlers()
