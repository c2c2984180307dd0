"""Weight sync, actor to rollouts: verified twice, fatal when anything is off.

1. A checksum per weight: of the actor's own tensor before the transport, and of the rollout's own tensor after it.
2. The behaviour probe: both sides score the same short token sequences; their log-probs must agree. On shared devices
   each does it while it has the device: the actor after the last bucket, the rollout when the trainers have offloaded
   and its KV cache is back, as it will sample. A sync on shared devices ends there, in the phase "rollout".
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlctl.loop.weight_transport import Transport
from specs.errors import NotFiniteError, SyncError
from specs.rounding import Tolerance
from specs.schema.metric import Metric, metrics
from specs.schema.recipes import SamplingSpec
from specs.schema.role_section import DType
from specs.schema.roles import ACTOR, ROLLOUT
from specs.schema.spec import WeightForm
from specs.wire import bodies
from specs.wire.batch import Batch
from specs.wire.messages import Verb
from workers.transports import sweep

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rlctl.loop.residency import Residency
    from rlctl.processes.calls import Call
    from rlctl.processes.group import Group
    from specs.wire.messages import Message

SHM = Transport("shm")
PROBE_SEQUENCES, PROBE_TOKENS = 2, 12
# For log-probs of random tokens. Two right forward passes of 16 layers in bf16 were up to 1.7 spacings apart; a layer
# with other weights, or a wrong temperature or rotation, 8 and more.
PROBE_TOLERANCE = {"fp32": Tolerance(2e-3, 512, "fp32"), "bf16": Tolerance(0.15, 6, "bf16")}

METRICS: tuple[Metric, ...] = metrics(
    "a sync was due after the step",
    {
        "sync/verified": "Always true: a sync whose checksums or probe disagree ends the run.",
        "sync/weights": "Tensors that were sent.",
        "sync/bytes [bytes]": "Their size.",
        "sync/sent_bytes [bytes]": "What the transport carried: less than `sync/bytes` where changes alone are sent.",
        "sync/GB_per_s [GB/s]": "`sync/bytes` by the seconds of the move, with its checksums and without the probe.",
        "sync/checksum_s [s]": "Spent on checksums by the actor's rank 0 and the slowest rollout, mostly at once.",
        "sync/probe_gap [nats]": "Largest difference of log-probs between actor and rollouts on the probe's tokens.",
        "sync/probe_s [s]": "Both sides' probe.",
    },
)


def probe_tolerance(spec: SamplingSpec) -> Tolerance:
    """Return what the behaviour probe allows."""
    if spec.rollout.max_probe_gap is not None:
        return Tolerance(spec.rollout.max_probe_gap)
    return PROBE_TOLERANCE["fp32" if spec.dtype(ROLLOUT) == spec.dtype(ACTOR) == "fp32" else "bf16"]


@dataclass(frozen=True)
class SyncReport:
    """The outcome of a sync: what it moved, and how well both sides agree afterwards."""

    weights: int
    nbytes: int
    sent_bytes: int  # that the actor put on the transport: less than `nbytes` where it sends changes alone
    seconds: float  # for moving them, checksums included
    checksum_s: float  # of them the actor's rank 0 and the slowest rollout hashed; the two mostly at the same time
    probe_s: float  # both sides' behaviour probe, beyond `seconds`
    probe_gap: float

    def metrics(self) -> dict[str, float | int | bool]:
        return {
            "sync/verified": True,  # an unverified sync never returns
            "sync/weights": self.weights,
            "sync/bytes": self.nbytes,
            "sync/sent_bytes": self.sent_bytes,
            "sync/GB_per_s": self.nbytes / max(self.seconds, 1e-9) / 1e9,
            "sync/checksum_s": self.checksum_s,
            "sync/probe_gap": self.probe_gap,
            "sync/probe_s": self.probe_s,
        }


class WeightSync:
    """Moves the actor's weights into every rollout replica."""

    def __init__(
        self,
        actor: Group,
        rollout: Group,
        residency: Residency,
        *,
        transport: Transport = SHM,
        dtype: DType,
        bucket_bytes: int,
        temperature: float,
        tolerance: Tolerance,
        vocab: int,
        probe_tokens: int = PROBE_TOKENS,
    ) -> None:
        self.actor, self.rollout, self.residency, self.transport = actor, rollout, residency, transport
        self.dtype, self.bucket_bytes = dtype, bucket_bytes
        self.temperature, self.tolerance = temperature, tolerance
        self.probe_batch = probe_batch(vocab, probe_tokens)
        self._version = 0  # of the actor's weights now: how many steps it has finished
        self._sent: int | None = None  # the version that every replica holds
        self._readers: Sequence[int] = ()  # replicas of the last pass; (): the next one meets all as for the first time
        self._announced: Sequence[bodies.WireWeight] = ()  # the weights of the last pass
        self._leftovers: Sequence[Mapping[str, str]] = ()
        self._actor_hashing_s, self._sent_bytes = 0.0, 0
        self._rollout_hashing_s: dict[int, float] = defaultdict(float)  # by replica

    def run(self, step: int | None = None) -> SyncReport:
        """One verified sync, begun in the phase "sync". Raises SyncError (or RoleFailure) and leaves nothing
        half-trusted: the run must end.
        After RanksFailed, `break_off` and run again."""
        started = time.perf_counter()
        self._actor_hashing_s, self._sent_bytes = 0.0, 0
        self._rollout_hashing_s.clear()
        try:
            self._move(self._begin(step), step)
            end = bodies.ImportEnd(version=self._version)
            ended = self.rollout.post(Verb.IMPORT_END, end, step=step, ranks=self._readers)
            for replica, answer in _by_replica(ended).items():
                self._rollout_hashing_s[replica] += bodies.ImportEnded.of(answer).checksum_s
            self.actor.call(Verb.EXPORT_END, step=step)
        finally:
            sweep(self._leftovers)
        moved_s = time.perf_counter() - started
        gap, probe_s = self._probe(step)
        self._sent = self._version
        nbytes = sum(weight.nbytes for weight in self._announced)
        hashing_s = self._actor_hashing_s + max(self._rollout_hashing_s.values(), default=0.0)
        return SyncReport(len(self._announced), nbytes, self._sent_bytes, moved_s, hashing_s, probe_s, gap)

    def actor_finished(self, step: int) -> None:
        """The actor's weights are those after `step` steps: the driver says so after each update and after a resume."""
        self._version = step

    def holds(self, step: int) -> bool:
        """Return whether every replica was last sent the weights after `step` steps."""
        return self._sent == step

    def forget_readers(self) -> None:
        """A replica was started again: the next sync meets every replica as if for the first time."""
        self._readers = ()

    def break_off(self, step: int | None) -> None:
        """After a `run` that lost a replica: both ends let go of it, and the next run begins with all of them again."""
        self.actor.call(Verb.EXPORT_END, bodies.ExportEnd(broken_off=True), step=step)
        self.actor.settle()
        self.rollout.settle()
        self.forget_readers()

    def _begin(self, step: int | None) -> bodies.Exporting:
        transport, options = self.transport.kind, dict(self.transport.options)
        answers = [bodies.WantedForm.of(answer) for answer in self.rollout.call(Verb.IMPORT_FORM, step=step)]
        form, readers = _form_for_all(answers), [answer.replica for answer in answers]
        export = bodies.ExportBegin(
            transport=transport,
            options=options,
            dtype=self.dtype,
            form=form,
            bucket_bytes=self.bucket_bytes,
            hosts=_by_host(answers),
            renew=readers != self._readers,
            held=[answer.holds for answer in answers],
        )
        begun = bodies.Exporting.of(self.actor.call(Verb.EXPORT_BEGIN, export, step=step)[0])
        self._leftovers = begun.offer["leftovers"]
        if begun.specs is not None:
            self._announced = begun.specs
        expected = bodies.ImportBegin(
            transport=transport, options=options, form=form, specs=begun.specs, offer=begun.offer
        )
        self.rollout.call(Verb.IMPORT_BEGIN, expected, step=step, ranks=readers)
        self._readers = readers
        return begun

    def _move(self, begun: bodies.Exporting, step: int | None) -> None:
        """Every weight, and every checksum compared."""
        move = self._move_in_blocks if begun.in_blocks else self._move_in_buckets
        arrived = set(move(begun, step))
        lost = [weight.name for weight in self._announced if weight.name not in arrived]
        if lost:
            raise SyncError(f"weight {lost[0]} was announced but never sent ({len(lost)} missing)", hint=_HINT)

    def _move_in_blocks(self, begun: bodies.Exporting, step: int | None) -> list[str]:
        """Both ends are told once, and pace each other."""
        arrived: list[str] = []
        for bucket in range(begun.buckets):
            writing = self.actor.post(Verb.EXPORT_BUCKET, bodies.ExportBucket(bucket=bucket), step=step)
            body = bodies.ImportBucket(bucket=bucket, entries=[])
            reading = self.rollout.post(Verb.IMPORT_BUCKET, body, step=step, ranks=self._readers)
            arrived += self._compare(reading, self._written(writing))
        return arrived

    def _move_in_buckets(self, begun: bodies.Exporting, step: int | None) -> list[str]:
        """Through two windows: the actor fills the next while the rollouts read the last."""
        arrived: list[str] = []
        reading: tuple[Call, list[bodies.SentWeight]] | None = None
        for bucket in range(begun.buckets):
            entries = self._written(self.actor.post(Verb.EXPORT_BUCKET, bodies.ExportBucket(bucket=bucket), step=step))
            if reading is not None:
                arrived += self._compare(*reading)
            body = bodies.ImportBucket(bucket=bucket, entries=entries)
            reading = (self.rollout.post(Verb.IMPORT_BUCKET, body, step=step, ranks=self._readers), entries)
        if reading is not None:
            arrived += self._compare(*reading)
        return arrived

    def _written(self, call: Call) -> list[bodies.SentWeight]:
        """Return what the actor's rank 0 reports that it sent, which must be as it was announced."""
        sent = bodies.Exported.of(call.result()[0])
        self._actor_hashing_s += sent.checksum_s
        self._sent_bytes += sent.sent_bytes
        announced = {weight.name: weight for weight in self._announced}
        for entry in sent.entries:
            weight = announced.get(entry.name)
            if weight is None or not entry.is_as(weight):
                told = f"comes as {_shown(entry)}; announced was {_shown(weight)}"
                raise SyncError(f"weight {entry.name} {told}", hint=_HINT)
        return sent.entries

    def _compare(self, call: Call, entries: Sequence[bodies.SentWeight]) -> list[str]:
        sent = {entry.name: entry.checksum for entry in entries}
        answers = {rank: bodies.Imported.of(answer) for rank, answer in _by_replica(call).items()}
        for replica, answer in answers.items():
            self._rollout_hashing_s[replica] += answer.checksum_s
            for name, expected in sent.items():
                actual = answer.checksums.get(name)
                if actual != expected:
                    differs = f"actor {expected}, rollout {replica} {actual}"
                    raise SyncError(f"weight {name} differs after the sync: {differs}", hint=_HINT)
        return list(sent)

    def _probe(self, step: int | None) -> tuple[float, float]:
        """Largest log-prob difference over the probe's tokens and all replicas, and the seconds that both sides took.
        One side after the other: at once, on a CPU that they share, they take twice as long. On shared devices the
        trainers hand theirs over in between, which is not counted."""
        tensors = self.probe_batch.columns
        started = time.perf_counter()
        expected_T = self.actor.call(Verb.PROBE, tensors=tensors, step=step)[0].tensors["logprob_T"]
        handover_s = 0.0
        if self.residency.shared:
            before = time.perf_counter()
            self.residency.enter("rollout", step=step)
            handover_s = time.perf_counter() - before
        replies = self.rollout.post(Verb.PROBE, bodies.Probe(temperature=self.temperature), tensors=tensors, step=step)
        answers = _by_replica(replies)
        seconds = time.perf_counter() - started - handover_s
        return self._worst_gap(expected_T, answers), seconds

    def _worst_gap(self, expected_T: NDArray[Any], answers: Mapping[int, Message]) -> float:
        if not np.isfinite(expected_T).all():
            hint = "lower actor.optimizer.lr, and begin at an earlier checkpoint with --from RUN@STEP"
            raise NotFiniteError("the actor's log-probs of the probe are not finite: its weights overflow", hint=hint)
        worst, scored = 0.0, np.ones(len(expected_T), dtype=bool)
        scored[self.probe_batch.offsets[:-1]] = False  # a first token has no log-prob
        allowed = self.tolerance.at(float(np.max(np.abs(expected_T))))
        for replica, answer in answers.items():
            gap_T = np.abs(answer.tensors["logprob_T"] - expected_T)
            gap, mean = float(np.max(gap_T)), float(np.mean(gap_T[scored]))
            # A mistake moves every token, rounding some: half as much is allowed on average. NaN is no number to allow.
            if not (gap <= allowed and mean <= allowed / 2):
                raise SyncError(
                    f"every weight arrived with the right bytes, but rollout {replica} does not behave like the actor: "
                    f"log-probs of the probe differ by {gap:.3g} (allowed {allowed:.3g}), on average by {mean:.3g} "
                    f"(allowed {allowed / 2:.3g})",
                    hint="the rollout engine computes with other weights than it reports (packed, cached or tied "
                    "copies), or in another precision; if the precision is meant, raise rollout.max_probe_gap",
                )
            worst = max(worst, gap)
        return worst


_HINT = "a weight was lost or changed on its way; nothing was sampled with it. Resume from the last checkpoint."


def _by_replica(call: Call) -> dict[int, Message]:
    """Answers by the rank of the replica, which stays when others are dropped."""
    return dict(zip(call.ranks, call.result(), strict=True))


def _form_for_all(answers: Sequence[bodies.WantedForm]) -> WeightForm:
    """Return what must be sent. Replicas get the same: the model too as soon as one of them lacks it."""
    forms: set[WeightForm] = {answer.form for answer in answers}
    return "apart" if len(forms) > 1 else forms.pop()


def _by_host(answers: Sequence[bodies.WantedForm]) -> list[list[int]]:
    """Replicas that can hand each other memory, together."""
    hosts: dict[str, list[int]] = {}
    for answer in answers:
        hosts.setdefault(answer.host or f"of {answer.replica} alone", []).append(answer.replica)
    return list(hosts.values())


def _shown(weight: bodies.WireWeight | None) -> str:
    return f"{weight.dtype} {weight.shape} ({weight.nbytes} bytes)" if weight else "nothing of that name"


def probe_batch(vocab: int, tokens: int = PROBE_TOKENS) -> Batch:
    """A few short, fixed token sequences, the same in every run of a vocabulary."""
    rng = np.random.default_rng(20_240_229)
    tokens_T: NDArray[np.int64] = rng.integers(0, vocab, PROBE_SEQUENCES * tokens)
    return Batch({"tokens_T": tokens_T, "length_B": np.full(PROBE_SEQUENCES, tokens, dtype=np.int64)})
