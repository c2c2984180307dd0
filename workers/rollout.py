"""A rollout replica: answers prompts with the actor's weights."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from backends import checksum
from backends.protocol import Rank, RolloutEngine
from backends.registry import rollout_engine
from specs.batch import Batch
from specs.messages import Message, Verb
from specs.role_config import RolloutConfig, Sampling
from workers.engine_rank import EngineRank
from workers.serve import Emit, Handler, Reply
from workers.weights import Importer, from_json


class Rollout(EngineRank[RolloutEngine]):
    """A rank of the rollout; each is a replica of its own."""

    def __init__(self, rank: Rank) -> None:
        super().__init__(rank)
        self._importer: Importer | None = None
        self.version = 0  # of the weights, as the driver counts them; every sample carries it

    @property
    def importer(self) -> Importer:
        assert self._importer is not None, "import_begin comes first"
        return self._importer

    def build(self, message: Message, emit: Emit) -> Reply:
        config = RolloutConfig.model_validate(message.body)
        return self.hold("rollout", config, rollout_engine(config.engine.kind))

    def generate(self, message: Message, emit: Emit) -> Reply:
        """Finished groups leave as parts; the answer itself carries counters only."""
        sampling = Sampling.model_validate(message.body["sampling"])

        def send(batch: Batch) -> None:
            emit({}, batch.with_columns(version_B=np.full(len(batch), self.version)).columns)

        counters = dict(self.engine.generate(message.batch, sampling, send))
        return {**counters, "used_GiB": self.used_GiB}, {}

    def probe(self, message: Message, emit: Emit) -> Reply:
        return {}, {"logprob_T": self.engine.score(message.batch, float(message.body["temperature"]))}

    def import_form(self, message: Message, emit: Emit) -> Reply:
        return {"form": self.engine.weight_form()}, {}

    def import_begin(self, message: Message, emit: Emit) -> Reply:
        body = message.body
        if self._importer is None:
            self._importer = Importer(self.engine, self.rank.rank, body["road"], body["options"])
        specs = None if body["specs"] is None else [from_json(spec) for spec in body["specs"]]
        self.importer.begin(specs, body["offer"], body["form"])
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
        return self.leave(lambda: self.engine.sleep(int(message.body["level"])))

    def wake(self, message: Message, emit: Emit) -> Reply:
        return self.come_back(lambda: self.engine.wake(message.body["tags"]))

    def close(self, message: Message, emit: Emit) -> Reply:
        if self._importer is not None:
            self._importer.close()
        return super().close(message, emit)

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
