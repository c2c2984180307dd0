"""The reference: a frozen model that says how likely the actor's tokens were to it."""

from __future__ import annotations

from collections.abc import Mapping

from backends.protocol import Rank
from specs.messages import Verb
from workers.serve import Handler
from workers.trainer import Trainer


def handlers(rank: Rank) -> Mapping[Verb, Handler]:
    return Trainer(rank).handlers()
