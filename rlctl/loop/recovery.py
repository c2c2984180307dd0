"""A sampler that was lost comes back: started again, built, given the actor's weights anew, and verified.

Only replicas of the rollout: each is a process of its own that nobody computes with, and all that it knows comes from
the spec and from the next sync. What it had finished stands; what it had not is sampled again
(rlctl/loop/sampling.py), to the same tokens where the engine's randomness depends on seed and sample alone.

With `rollout.min_processes` a run also begins without replicas that are not there in time. One that comes later is
built before the next sync, and takes part from that sync on. A replica is known by its rank throughout.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlctl.loop.residency import SLEEP_LEVEL
from rlctl.models import as_built_check
from rlctl.processes.calls import Body, RanksLost
from rlctl.processes.failures import Evidence
from rlctl.processes.launch import tail
from rlctl.processes.rank_states import RestartPolicy
from specs.errors import AsBuiltError, Cause
from specs.schema.metric import Metric
from specs.wire.as_built import AsBuilt
from specs.wire.bodies import Sleep
from specs.wire.messages import Message, Verb

if TYPE_CHECKING:
    from rlctl.loop.residency import Residency
    from rlctl.loop.sync import SyncReport, WeightSync
    from rlctl.processes.groups import Groups

ROLLOUT = "rollout"

METRICS: tuple[Metric, ...] = (
    Metric(name="rollout/restarts", meaning="Replicas started anew, in this attempt so far."),
    Metric(
        name="time/restart_s",
        unit="s",
        meaning="Bringing lost replicas back and taking late ones in, since the last step.",
    ),
    Metric(name="rollout/dropped", meaning="Replicas that are lost for good.", when="there are any"),
    Metric(name="rollout/replicas", meaning="Replicas that take part.", when="`rollout.min_processes` is set"),
    Metric(name="rollout/late", meaning="Replicas that may still come.", when="`rollout.min_processes` is set"),
)


class LossWarnings:
    """Says of each replica that is lost or late what becomes of it."""

    def __init__(self, groups: Groups, far: Mapping[int, str], warn: Callable[[str], None]) -> None:
        """`far`: rank → host of those on other hosts."""
        self.groups, self.far, self.warn = groups, far, warn

    def __call__(self, lost: Evidence) -> None:
        ranks, group = self.groups.ranks, self.groups[ROLLOUT]
        log_path = self.groups.launcher.log_path(lost.role, lost.rank)
        if lost.log_name:
            log_path = log_path.with_name(lost.log_name)
        who = f"{lost.role} rank {lost.rank}"
        if host := self.far.get(lost.rank, ""):
            who += f" on {host}"
        least = f"(rollout.min_processes = {ranks.policy.least})"
        if lost.rank in ranks.late(lost.role):
            self.warn(
                f"{who} {lost.message}. The run goes on with {group.size} of {group.processes} replicas {least} and "
                f"takes it in at the sync after it comes; {_end_of(log_path)}"
            )
        elif lost.rank in ranks.dropped(lost.role):
            why = f"; {_end_of(log_path)}" if lost.needs_log else ""
            self.warn(f"{who} is lost for good: {lost.message}. The run goes on with {group.size} of them {least}{why}")
        else:
            restart, limit = ranks.restarts + len(ranks.lost(ROLLOUT)), ranks.policy.limit
            self.warn(
                f"{lost.role} rank {lost.rank} was lost: {lost.message}. It is started again (restart {restart} of at "
                f"most {limit}, rollout.max_restarts); log: {log_path}"
            )


def begin_with_fewer(groups: Groups, least: int | None, on_loss: LossWarnings) -> None:
    """Before the start: let it go on without replicas that do not come up, as long as there are `least`."""
    if least is not None:
        groups.ranks.allow_restarts(RestartPolicy(ROLLOUT, 0, on_loss, least, frozenset(on_loss.far)))


def _end_of(log_path: Path) -> str:
    last = tail(log_path, 1).strip()
    return f"log: {log_path}" + (f", which ends in: {last}" if last else "")


class SteadySync:
    """Weight sync that brings lost samplers back, at most `limit` times in all. From its making on, `groups` takes the
    loss of a sampler for something to make good instead of the end of the run."""

    def __init__(
        self,
        groups: Groups,
        residency: Residency,
        weights: WeightSync,
        *,
        body: Mapping[str, Any],
        built: Sequence[AsBuilt],
        limit: int,
        least: int | None = None,
        start_timeout_s: float,
        on_loss: LossWarnings,
        tell: Callable[[str], None] = lambda text: None,
        admit: Callable[[AsBuilt], None] = lambda report: None,
    ) -> None:
        """`body` is what the rollout was told to build, `built` what its ranks reported. The run
        goes on with `least` of them (rlctl/processes/rank_states.py). `admit` gets the report of a late one, and raises
        AsBuiltError where it is not what the spec asks for."""
        self.groups, self.residency, self.weights = groups, residency, weights
        self.body, self.start_timeout_s = body, start_timeout_s
        self.built = {report.rank: report for report in built}
        self._tell, self._admit = tell, admit
        self.ranks = groups.ranks
        self.ranks.allow_restarts(RestartPolicy(ROLLOUT, limit, on_loss, least, frozenset(on_loss.far)))
        self._seconds = 0.0

    def run(self, step: int | None = None) -> SyncReport:
        """A verified sync to every replica, in the phase "sync". Replicas that are lost, also on the way, are brought
        back for it, and late ones that have come are taken in. Raises what `WeightSync.run` raises, and RoleFailure
        when the restarts are used up."""
        while True:
            if self.ranks.lost(ROLLOUT) or self.groups.come(ROLLOUT):
                with self._timed():
                    self._bring_back(step)
            try:
                return self.weights.run(step)
            except RanksLost:
                with self._timed():
                    self.weights.break_off(step)

    def restore(self, step: int | None) -> None:
        """If samplers are lost, have them all back with the actor's weights, and every role where it was."""
        phase = self.residency.phase
        assert phase is not None, "a phase comes first"
        while self.ranks.lost(ROLLOUT):
            with self._timed():
                self.run(step)
                self.residency.enter(phase, step=step)

    def resend_if_asleep(self, step: int | None) -> None:
        """Before sampling: a rollout that was put to sleep since its last sync gets the weights again, verified."""
        if self.residency.sampler_asleep:
            self.residency.enter("sync", step=step)
            self.run(step)

    def actor_finished(self, step: int) -> None:
        """The actor's weights are those after `step` steps: what the next `run` sends."""
        self.weights.actor_finished(step)

    def holds(self, step: int) -> bool:
        """Whether every replica was last sent the weights after `step` steps."""
        return self.weights.holds(step)

    def take_metrics(self) -> dict[str, float | int]:
        """Restarts of this attempt so far, and seconds spent on them since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        told: dict[str, float | int] = {"rollout/restarts": self.ranks.restarts, "time/restart_s": seconds}
        if dropped := self.ranks.dropped(ROLLOUT):
            told["rollout/dropped"] = len(dropped)
        if self.ranks.policy.least is not None:
            here = self.groups[ROLLOUT].size
            told |= {"rollout/replicas": here, "rollout/late": len(self.ranks.late(ROLLOUT))}
        return told

    def _bring_back(self, step: int | None) -> None:
        self.residency.enter("build", step=step)
        while self.ranks.lost(ROLLOUT):
            with self.groups.restart(ROLLOUT) as ranks:  # broken off, by a Ctrl-C too, they are lost as before
                self._build(ranks, step)
        if self.groups.come(ROLLOUT):
            with self.groups.take_in(ROLLOUT) as ranks:
                self._build_late(ranks, step)
            self._tell_of(ranks)
        self.weights.forget_readers()
        self.residency.enter("sync", step=step)

    def _build(self, ranks: Sequence[int], step: int | None) -> None:
        for report in self._reports(ranks, step):
            as_built_check.check_same_again(self.built[report.rank], report)

    def _build_late(self, ranks: Sequence[int], step: int | None) -> None:
        """One that is not what the spec asks for is left out."""
        late = [(rank, self.groups[ROLLOUT].take_late(rank)) for rank in ranks]
        reports = [AsBuilt.model_validate(answer.body) for _, answer in late if answer is not None]
        if to_ask := [rank for rank, answer in late if answer is None]:
            reports += self._reports(to_ask, step)
        for report in reports:
            try:
                self._admit(report)
            except AsBuiltError as error:
                self.groups.leave_out(Evidence(ROLLOUT, report.rank, Cause.RAISED, error.message, needs_log=False))
            else:
                self.built[report.rank] = report

    def _tell_of(self, ranks: Sequence[int]) -> None:
        group = self.groups[ROLLOUT]
        if came := [str(rank) for rank in ranks if rank in group.here]:
            who = f"rank{'s' * (len(came) > 1)} {', '.join(came)}"
            self._tell(f"{ROLLOUT} {who} came late and takes part now: {group.size} of {group.processes} replicas")

    def _reports(self, ranks: Sequence[int], step: int | None) -> list[AsBuilt]:
        """What those that are not lost again have built."""
        answers = self._ask(Verb.BUILD, self.body, ranks, step)
        if self.residency.shared:
            self._ask(Verb.SLEEP, Sleep(level=SLEEP_LEVEL), ranks, step)
        return [AsBuilt.model_validate(answer.body) for answer in answers]

    def _ask(self, verb: Verb, body: Body, ranks: Sequence[int], step: int | None) -> Sequence[Message]:
        """Answers of those that are not lost again."""
        call = self.groups[ROLLOUT].post(verb, body, step=step, timeout_s=self.start_timeout_s, ranks=ranks)
        try:
            return call.result()
        except RanksLost:
            return [*call.answers.values()]

    @contextmanager
    def _timed(self) -> Iterator[None]:
        before, started = self._seconds, time.perf_counter()
        try:
            yield
        finally:  # what was timed inside is part of this
            self._seconds = before + time.perf_counter() - started
