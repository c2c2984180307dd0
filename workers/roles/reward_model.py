"""The reward model's role: a frozen model that gives each sequence, in its own tokens, one score."""

from __future__ import annotations

from collections.abc import Mapping

from backends.protocol import Rank
from specs.wire.messages import Verb
from workers.roles.trainer import Trainer
from workers.serve import Handler


def handlers(rank: Rank) -> Mapping[Verb, Handler]:
    return Trainer(rank).handlers()
