"""Base of actor and ref: build a train engine, and compute log-probs."""

from __future__ import annotations

from collections.abc import Mapping

from backends.protocol import TrainEngine
from backends.registry import train_engine
from specs.wire import bodies
from specs.wire.messages import Verb
from specs.wire.role_config import TrainConfig
from workers.roles.engine_rank import EngineRank
from workers.serve import Emit, Handler, Reply, Request, TypedHandler, typed


class Trainer(EngineRank[TrainEngine]):
    """A rank that holds a train engine."""

    def build(self, call: Request[TrainConfig], emit: Emit) -> Reply:
        config = call.body
        return self.hold(config.role, config, train_engine(config.engine.kind).build)

    def logprobs(self, call: Request[bodies.Logprobs], emit: Emit) -> Reply:
        """Log-probs of the model; with `adapters` false, of the model without its adapters."""
        logprob_T = self.engine.forward(call.batch, adapters=call.body.adapters)
        return {"used_GiB": self.used_GiB}, {"logprob_T": logprob_T}

    def offload(self, call: Request[bodies.Nothing], emit: Emit) -> Reply:
        return self.leave(self.engine.offload)

    def onload(self, call: Request[bodies.Nothing], emit: Emit) -> Reply:
        return self.come_back(self.engine.onload)

    def handlers(self) -> Mapping[Verb, Handler]:
        verbs: Mapping[Verb, TypedHandler] = {
            Verb.BUILD: self.build,
            Verb.LOGPROBS: self.logprobs,
            Verb.OFFLOAD: self.offload,
            Verb.ONLOAD: self.onload,
            Verb.CLOSE: self.close,
        }
        return typed(verbs, {Verb.BUILD: TrainConfig})
