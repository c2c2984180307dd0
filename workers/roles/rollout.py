"""The rollout role: writes completions with the actor's weights."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import Future
from dataclasses import dataclass, field

from backends import activity
from backends.completions import Completions
from backends.protocol import Rank, RolloutEngine
from backends.registry import rollout_engine
from backends.replica_span import ReplicaSpan
from backends.weights import checksum
from specs.wire import bodies
from specs.wire.batch import Batch
from specs.wire.heartbeat import amount
from specs.wire.role_config import RolloutConfig
from workers.roles import handlers_of
from workers.roles.engine_rank import EngineRank
from workers.roles.open_requests import OpenRequests
from workers.serve import Emit, Handlers, Reply, Request, Working
from workers.transports.ends import Importer, spec_of
from workers.transports.host_readers import host_of_this_process

PART_STEPS = 4  # of the engine, from one part of a call to the next: each costs messages and a request to a grader


@dataclass
class Sampled:
    """A call whose completions are being drawn."""

    completions: Completions
    ids: set[int]  # that are not here yet
    counted: Counter[str]  # by the engine, when the call began
    reply: Future[Reply] = field(default_factory=Future)


class Rollout(EngineRank[RolloutEngine]):
    """A rank of the rollout role; each is a separate replica. It draws for any number of calls at once: what comes
    while others are drawn gets the next free slots."""

    def __init__(self, rank: Rank) -> None:
        super().__init__(rank)
        self._importer: Importer | None = None
        self._calls: list[Sampled] = []  # whose completions are being drawn
        self._steps = 0  # of the engine
        self._requests: OpenRequests | None = None
        self.version = 0  # version of the weights, counted by the driver; every sample carries it

    @property
    def importer(self) -> Importer:
        assert self._importer is not None, "import_begin comes first"
        return self._importer

    @property
    def requests(self) -> OpenRequests:
        assert self._requests is not None, "build comes first"
        return self._requests

    def held_GiB(self) -> float:
        told = self.engine.gpu_memory_GiB()
        return super().held_GiB() if told is None else told[0]

    def peak_GiB(self) -> float:
        told = self.engine.gpu_memory_GiB()
        return super().peak_GiB() if told is None else told[1]

    def build(self, call: Request[RolloutConfig], emit: Emit) -> Reply:
        config = call.body
        reply = self.hold("rollout", config, rollout_engine(config.engine.kind))
        self._requests = OpenRequests(self.engine)
        return reply

    def generate(self, call: Request[bodies.Generate], emit: Emit) -> Future[Reply]:
        """Send finished groups as parts, every `PART_STEPS`, or those of turns at once, for an environment waits for
        them; the final reply carries only counters."""

        def send(batch: Batch) -> None:
            emit({}, self.requests.versions_of(batch).columns)

        limit = call.body.sampling.max_response_tokens
        what = f"generate of {amount(len(call.batch), 'prompt')}, longest {limit:,} tokens"
        activity.describe(what, self.engine.progress_unit, counted=self.engine.counts_progress)
        self.engine.forget(call.body.forget)
        completions = Completions(call.batch, call.body.sampling, send, keep=call.body.keep)
        requests = completions.requests()
        self.requests.add(requests)
        sampled = Sampled(completions, {request.id for request in requests}, Counter(self.engine.counters()))
        self._calls.append(sampled)
        if not sampled.ids:
            self._end(sampled)
        return sampled.reply

    @property
    def pending(self) -> bool:
        """Whether completions are being drawn. Not while weights change, until the new ones are proven."""
        return bool(self._calls) and not self.requests.suspended

    def advance(self) -> None:
        """Draw a token or more of every open completion; reply to the calls that have all of theirs."""
        try:
            found = self.requests.step(self.version)
        except Exception as error:  # none is open any more
            calls, self._calls = self._calls, []
            for call in calls:
                call.reply.set_exception(error)
            return
        self._steps += 1
        is_due = self._steps % PART_STEPS == 0
        for call in [*self._calls] if found or is_due else ():
            for completion in found:
                if completion.id in call.ids:
                    call.ids.discard(completion.id)
                    call.completions.finish(completion)
            if is_due or call.completions.keep or not call.ids:
                call.completions.flush()
            if not call.ids:
                self._end(call)

    def _end(self, call: Sampled) -> None:
        self._calls.remove(call)
        counted = Counter(self.engine.counters())
        counted.subtract(call.counted)
        counts = {"generated_tokens": call.completions.generated_tokens, **counted}
        call.reply.set_result(({**counts, "used_GiB": self.used_GiB}, {}))

    def probe(self, call: Request[bodies.Probe], emit: Emit) -> Reply:
        logprob_T = self.engine.score(call.batch, call.body.temperature)
        self.requests.resume()
        return {}, {"logprob_T": logprob_T}

    def import_form(self, call: Request[bodies.Nothing], emit: Emit) -> Reply:
        holds = "" if self._importer is None else self._importer.reader.holds
        who = {"replica": self.rank.rank, "host": host_of_this_process()}
        return {"form": self.engine.weight_form(), "holds": holds, **who}, {}

    def import_begin(self, call: Request[bodies.ImportBegin], emit: Emit) -> Reply:
        body = call.body
        self.requests.suspend(self.version)
        if self._importer is None:
            self._importer = Importer(self.engine, self.rank.rank, body.transport, body.options)
        specs = None if body.specs is None else [spec_of(weight) for weight in body.specs]
        self.importer.begin(specs, body.offer, body.form)
        return {}, {}

    def import_bucket(self, call: Request[bodies.ImportBucket], emit: Emit) -> Reply:
        hashed_s = checksum.seconds()
        checksums = self.importer.read(call.body.bucket, call.body.entries)
        return {"checksums": checksums, "checksum_s": checksum.seconds() - hashed_s}, {}

    def import_end(self, call: Request[bodies.ImportEnd], emit: Emit) -> Reply:
        hashed_s = checksum.seconds()
        weights = self.importer.end()
        self.version = call.body.version
        return {"weights": weights, "checksum_s": checksum.seconds() - hashed_s}, {}

    def sleep(self, call: Request[bodies.Sleep], emit: Emit) -> Reply:
        return self.leave(lambda: self.engine.sleep(call.body.level))

    def wake(self, call: Request[bodies.Wake], emit: Emit) -> Reply:
        return self.come_back(lambda: self.engine.wake(call.body.tags))

    def close(self, call: Request[bodies.Nothing], emit: Emit) -> Reply:
        if self._importer is not None:
            self._importer.close()
        return super().close(call, emit)


def hold_part(span: ReplicaSpan) -> None:
    """Hold a part of a replica that spans nodes, until the process is ended."""
    build, address, port = span.await_begin()
    config = RolloutConfig.model_validate(build)
    rollout_engine(config.engine.kind).hold_part(config, span, address, port)


def handlers(rank: Rank) -> Handlers:
    rollout = Rollout(rank)
    return Working(handlers_of(rollout), rollout)
