"""What actor and ref share: building a train engine, and log-probs."""

from __future__ import annotations

from collections.abc import Mapping

from backends.protocol import TrainEngine
from backends.registry import train_engine
from specs.messages import Message, Verb
from specs.role_config import TrainConfig
from workers.engine_rank import EngineRank
from workers.serve import Emit, Handler, Reply


class Trainer(EngineRank[TrainEngine]):
    """A rank that holds a train engine."""

    def build(self, message: Message, emit: Emit) -> Reply:
        config = TrainConfig.model_validate(message.body)
        return self.hold(config.role, config, train_engine(config.engine.kind))

    def logprobs(self, message: Message, emit: Emit) -> Reply:
        """Of the model as it is, or, with `adapters` false, of the one that its adapters started from."""
        adapters = bool(message.body.get("adapters", True))
        logprob_T = self.engine.forward(message.batch, adapters=adapters)
        return {"used_GiB": self.used_GiB}, {"logprob_T": logprob_T}

    def offload(self, message: Message, emit: Emit) -> Reply:
        return self.leave(self.engine.offload)

    def onload(self, message: Message, emit: Emit) -> Reply:
        return self.come_back(self.engine.onload)

    def handlers(self) -> Mapping[Verb, Handler]:
        return {
            Verb.BUILD: self.build,
            Verb.LOGPROBS: self.logprobs,
            Verb.OFFLOAD: self.offload,
            Verb.ONLOAD: self.onload,
            Verb.CLOSE: self.close,
        }
