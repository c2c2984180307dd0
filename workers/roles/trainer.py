"""Base of every role with a train engine: build it, and compute log-probs, values or scores."""

from __future__ import annotations

from typing import Any

from backends import activity
from backends.protocol import Rank, TrainEngine
from backends.registry import train_engine
from specs.wire import bodies
from specs.wire.role_config import TrainConfig
from workers.roles import handlers_of
from workers.roles.engine_rank import EngineRank
from workers.serve import Emit, Handlers, Reply, Request


class Trainer(EngineRank[TrainEngine]):
    """A rank that holds a train engine."""

    config: TrainConfig  # since it was built

    def build(self, call: Request[TrainConfig], emit: Emit) -> Reply:
        self.config = config = call.body
        return self.hold(config.role, config, train_engine(config.engine.kind))

    def logprobs(self, call: Request[bodies.Logprobs], emit: Emit) -> Reply:
        """Log-probs of the model; with `adapters` false, of the model without its adapters."""
        self.describe(call)
        logprob_T = self.engine.forward(call.batch, adapters=call.body.adapters)
        return {"used_GiB": self.used_GiB}, {"logprob_T": logprob_T}

    def values(self, call: Request[bodies.Nothing], emit: Emit) -> Reply:
        """Return the value head's values before each loss token."""
        self.describe(call)
        return {"used_GiB": self.used_GiB}, {"value_T": self.engine.values(call.batch)}

    def scores(self, call: Request[bodies.Nothing], emit: Emit) -> Reply:
        """Return the head's score of each sequence."""
        self.describe(call)
        return {"used_GiB": self.used_GiB}, {"score_B": self.engine.scores(call.batch)}

    def describe(self, call: Request[Any]) -> None:
        """Say what the verb has to do, for the heartbeat."""
        activity.describe(activity.verb(), "micro-batch", counted=self.engine.counts_progress)
        activity.describe_samples(len(call.batch), call.batch.num_tokens)

    def offload(self, call: Request[bodies.Nothing], emit: Emit) -> Reply:
        return self.leave(self.engine.offload)

    def onload(self, call: Request[bodies.Nothing], emit: Emit) -> Reply:
        return self.come_back(self.engine.onload)


def handlers(rank: Rank) -> Handlers:
    """Make the handlers of a model that never learns, such as the reference."""
    return handlers_of(Trainer(rank))
