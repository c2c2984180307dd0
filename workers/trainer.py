"""What actor and ref share: building a train engine, and log-probs."""

from __future__ import annotations

from collections.abc import Mapping

from backends import memory
from backends.protocol import Rank, TrainEngine
from backends.registry import train_engine
from specs.messages import Message, Verb
from specs.role_config import TrainConfig
from workers.report import as_built
from workers.serve import Emit, Handler, Reply


class Trainer:
    """A rank that holds a train engine."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self._engine: TrainEngine | None = None
        self.device = "cpu"
        self.before_GiB = 0.0  # held before there was a model

    @property
    def engine(self) -> TrainEngine:
        assert self._engine is not None, "build comes first"
        return self._engine

    def build(self, message: Message, emit: Emit) -> Reply:
        config = TrainConfig.model_validate(message.body)
        self.device = config.model.device
        engine = train_engine(config.engine.kind)
        self.before_GiB = memory.held_GiB(self.device)
        self._engine = engine.build(config, self.rank)
        report = as_built(
            config.role, self.rank, engine=config.engine.kind, device=config.model.device, model=self.engine.built()
        )
        return report.model_dump(), {}

    def logprobs(self, message: Message, emit: Emit) -> Reply:
        """Of the model as it is, or, with `adapters` false, of the one that its adapters started from."""
        adapters = bool(message.body.get("adapters", True))
        logprob_T = self.engine.forward(message.batch, adapters=adapters)
        return {"used_GiB": memory.used_GiB(self.device, self.before_GiB)}, {"logprob_T": logprob_T}

    def offload(self, message: Message, emit: Emit) -> Reply:
        """Leave the device to other roles. Answers the memory held before and after, in GiB."""
        before = memory.held_GiB(self.device)
        self.engine.offload()
        memory.hand_back(self.device)
        return {"before_GiB": before, "after_GiB": memory.held_GiB(self.device)}, {}

    def onload(self, message: Message, emit: Emit) -> Reply:
        """Undo `offload`, and answer as it does."""
        before = memory.held_GiB(self.device)
        self.engine.onload()
        return {"before_GiB": before, "after_GiB": memory.held_GiB(self.device)}, {}

    def close(self, message: Message, emit: Emit) -> Reply:
        if self._engine is not None:
            self._engine.close()
        return {}, {}

    def handlers(self) -> Mapping[Verb, Handler]:
        return {
            Verb.BUILD: self.build,
            Verb.LOGPROBS: self.logprobs,
            Verb.OFFLOAD: self.offload,
            Verb.ONLOAD: self.onload,
            Verb.CLOSE: self.close,
        }
