"""A rollout replica: answers prompts with the actor's weights."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from backends import checksum, memory
from backends.protocol import Rank, RolloutEngine
from backends.registry import rollout_engine
from specs.batch import Batch
from specs.messages import Message, Verb
from specs.role_config import RolloutConfig, Sampling
from workers.report import as_built
from workers.serve import Emit, Handler, Reply
from workers.weights import Importer, from_json


class Rollout:
    """A rank of the rollout; each is a replica of its own."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self._engine: RolloutEngine | None = None
        self._importer: Importer | None = None
        self.version = 0  # of the weights, as the driver counts them; every sample carries it
        self.device = "cpu"
        self.before_GiB = 0.0  # held before there was a model

    @property
    def engine(self) -> RolloutEngine:
        assert self._engine is not None, "build comes first"
        return self._engine

    @property
    def importer(self) -> Importer:
        assert self._importer is not None, "import_begin comes first"
        return self._importer

    def build(self, message: Message, emit: Emit) -> Reply:
        config = RolloutConfig.model_validate(message.body)
        self.device = config.model.device
        engine = rollout_engine(config.engine.kind)
        self.before_GiB = memory.held_GiB(self.device)
        self._engine = engine.build(config, self.rank)
        report = as_built(
            "rollout", self.rank, engine=config.engine.kind, device=config.model.device, model=self.engine.built()
        )
        return report.model_dump(), {}

    def generate(self, message: Message, emit: Emit) -> Reply:
        """Finished groups leave as parts; the answer itself carries counters only."""
        sampling = Sampling.model_validate(message.body["sampling"])

        def send(batch: Batch) -> None:
            emit({}, batch.with_columns(version_B=np.full(len(batch), self.version)).columns)

        counters = dict(self.engine.generate(message.batch, sampling, send))
        return {**counters, "used_GiB": memory.used_GiB(self.device, self.before_GiB)}, {}

    def probe(self, message: Message, emit: Emit) -> Reply:
        return {}, {"logprob_T": self.engine.score(message.batch, float(message.body["temperature"]))}

    def import_form(self, message: Message, emit: Emit) -> Reply:
        return {"form": self.engine.weight_form()}, {}

    def import_begin(self, message: Message, emit: Emit) -> Reply:
        body = message.body
        if self._importer is None:
            self._importer = Importer(self.engine, self.rank.rank, body["road"], body["options"])
        self.importer.begin([from_json(spec) for spec in body["specs"]], body["offer"], body["form"])
        return {}, {}

    def import_bucket(self, message: Message, emit: Emit) -> Reply:
        hashed_s = checksum.seconds()
        checksums = self.importer.read(int(message.body["bucket"]), message.body["entries"])
        return {"checksums": checksums, "checksum_s": checksum.seconds() - hashed_s}, {}

    def import_end(self, message: Message, emit: Emit) -> Reply:
        hashed_s = checksum.seconds()
        weights = self.importer.end()
        self.version = int(message.body["version"])
        return {"weights": weights, "checksum_s": checksum.seconds() - hashed_s}, {}

    def sleep(self, message: Message, emit: Emit) -> Reply:
        """Leave the device to trainers. Answers the memory held before and after, in GiB."""
        before = memory.held_GiB(self.device)
        self.engine.sleep(int(message.body["level"]))
        memory.hand_back(self.device)
        return {"before_GiB": before, "after_GiB": memory.held_GiB(self.device)}, {}

    def wake(self, message: Message, emit: Emit) -> Reply:
        """Bring back what `tags` name, and answer as `sleep` does."""
        before = memory.held_GiB(self.device)
        self.engine.wake(message.body["tags"])
        return {"before_GiB": before, "after_GiB": memory.held_GiB(self.device)}, {}

    def close(self, message: Message, emit: Emit) -> Reply:
        if self._importer is not None:
            self._importer.close()
        if self._engine is not None:
            self._engine.close()
        return {}, {}

    def handlers(self) -> Mapping[Verb, Handler]:
        return {
            Verb.BUILD: self.build,
            Verb.GENERATE: self.generate,
            Verb.PROBE: self.probe,
            Verb.IMPORT_FORM: self.import_form,
            Verb.IMPORT_BEGIN: self.import_begin,
            Verb.IMPORT_BUCKET: self.import_bucket,
            Verb.IMPORT_END: self.import_end,
            Verb.SLEEP: self.sleep,
            Verb.WAKE: self.wake,
            Verb.CLOSE: self.close,
        }


def handlers(rank: Rank) -> Mapping[Verb, Handler]:
    return Rollout(rank).handlers()
