"""The critic: a model that learns to predict what a completion will still earn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from backends.protocol import Rank
from specs.schema.roles import CRITIC, RoleName
from specs.wire.messages import Verb
from workers.roles.score_learner import ScoreLearner
from workers.serve import Handler


class Critic(ScoreLearner):
    """A rank of the critic."""

    role: ClassVar[RoleName] = CRITIC


def handlers(rank: Rank) -> Mapping[Verb, Handler]:
    return Critic(rank).handlers()
