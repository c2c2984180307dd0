"""A sampler that was lost comes back: started again, built, given the actor's weights anew, and verified. So does a
process of the reward role on another host.

Only they: each is a process of its own that nobody computes with, and all that it knows comes from the spec and from
the next sync. What it had finished stands; what it had not is sampled again (rlctl/loop/sampling.py), to the same
tokens where the engine's randomness depends on seed and sample alone, or graded by others
(rlctl/loop/scores/graders.py).

With `min_processes` a run also begins without those that are not there in time. A replica that comes later is built
before the next sync, and takes part from that sync on; a process of the reward role before the next step. Each is known
by its rank throughout.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
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
from specs.schema.role_section import Dispensable
from specs.schema.roles import REWARD, ROLES, ROLLOUT, RoleName
from specs.wire.as_built import AsBuilt
from specs.wire.bodies import Sleep
from specs.wire.messages import Message, Verb

if TYPE_CHECKING:
    from rlctl.loop.residency import Residency
    from rlctl.loop.sync import SyncReport, WeightSync
    from rlctl.processes.groups import Groups
    from rlctl.processes.placement import Plan

_FEWER = "`rollout.min_processes` is set"
_FAR_GRADERS = "`reward.nodes` is above 1"
METRICS: tuple[Metric, ...] = (
    Metric(name="rollout/restarts", meaning="Replicas started anew, in this attempt so far."),
    Metric(
        name="time/restart_s",
        unit="s",
        meaning="Bringing back lost ranks of rollout and reward role and taking late ones in, since the last step.",
    ),
    Metric(name="rollout/dropped", meaning="Replicas that are lost for good.", when="there are any"),
    Metric(name="rollout/replicas", meaning="Replicas that take part.", when=_FEWER),
    Metric(name="rollout/late", meaning="Replicas that may still come.", when=_FEWER),
    Metric(
        name="reward/restarts",
        meaning="Processes of the reward role started anew, in this attempt so far.",
        when=_FAR_GRADERS,
    ),
    Metric(name="reward/processes", meaning="Processes of the reward role.", when=_FAR_GRADERS),
    Metric(
        name="reward/dropped",
        meaning="Processes of the reward role that are lost for good.",
        when="there are any",
    ),
)


class LossWarnings:
    """Says of each rank that is lost or late what becomes of it."""

    def __init__(self, groups: Groups, far: Mapping[int, str], warn: Callable[[str], None]) -> None:
        """`far`: rank → host of those on other hosts."""
        self.groups, self.far, self.warn = groups, far, warn

    def __call__(self, lost: Evidence) -> None:
        ranks, group = self.groups.ranks, self.groups[lost.role]
        policy, each = ranks.policy_of(lost.role), ROLES[lost.role]
        log_path = self.groups.launcher.log_path(lost.role, lost.rank)
        if lost.log_name:
            log_path = log_path.with_name(lost.log_name)
        who = f"{lost.role} rank {lost.rank}"
        if host := self.far.get(lost.rank, ""):
            who += f" on {host}"
        least = f"({lost.role}.min_processes = {policy.least})"
        if lost.rank in ranks.late(lost.role):
            why = f"; {_end_of(log_path)}" if lost.needs_log else ""
            self.warn(
                f"{who} {lost.message}. The run goes on with {group.size} of {group.processes} {each.several} {least} "
                f"and takes it in at the {'sync' if each.samples else 'step'} after it comes{why}"
            )
        elif lost.rank in ranks.dropped(lost.role):
            why = f"; {_end_of(log_path)}" if lost.needs_log else ""
            self.warn(f"{who} is lost for good: {lost.message}. The run goes on with {group.size} of them {least}{why}")
        else:
            restart = ranks.restarts[lost.role] + len(ranks.lost(lost.role))
            self.warn(
                f"{who} was lost: {lost.message}. It is started again (restart {restart} of at most {policy.limit}, "
                f"{lost.role}.max_restarts); log: {log_path}"
            )


def policy_for(
    role: RoleName, section: Dispensable, plan: Plan, groups: Groups, warn: Callable[[str], None]
) -> RestartPolicy:
    """What becomes of ranks of a role that are lost. On the driver's host a process of the reward role is needed."""
    placed = plan.role(role)
    far = {rank: host for rank in range(placed.processes) if (host := placed.host_of(rank))}
    on_loss = LossWarnings(groups, far, warn)
    covered = None if ROLES[role].samples else frozenset(far)
    return RestartPolicy(role, section.max_restarts, on_loss, section.min_processes, frozenset(far), covered)


def begin_with_fewer(groups: Groups, policy: RestartPolicy) -> None:
    """Before the start: let it go on without ranks that do not come up, as long as there are enough."""
    if policy.least is not None:
        groups.ranks.allow_restarts(replace(policy, limit=0))


def _end_of(log_path: Path) -> str:
    last = tail(log_path, 1).strip()
    return f"log: {log_path}" + (f", which ends in: {last}" if last else "")


class Returns:
    """Brings lost ranks of a role back, and takes late ones in. From its making on, `groups` takes the loss of a rank
    that the `policy` covers for something to make good instead of the end of the run."""

    def __init__(
        self,
        groups: Groups,
        policy: RestartPolicy,
        *,
        body: Mapping[str, Any],
        built: Sequence[AsBuilt],
        start_timeout_s: float,
        tell: Callable[[str], None] = lambda text: None,
        admit: Callable[[AsBuilt], None] = lambda report: None,
    ) -> None:
        """`body` is what the role was told to build, `built` what its ranks reported. `admit` gets the report of a late
        one, and raises AsBuiltError where it is not what the spec asks for."""
        self.groups, self.role, self.policy = groups, policy.role, policy
        self.body, self.start_timeout_s = body, start_timeout_s
        self.built = {report.rank: report for report in built}
        self._tell, self._admit = tell, admit
        self.ranks = groups.ranks
        self.ranks.allow_restarts(policy)

    @property
    def due(self) -> bool:
        """Whether there is anybody to bring back or to take in."""
        return bool(self.ranks.lost(self.role) or self.groups.come(self.role))

    def bring_back(self, step: int | None, after: Callable[[Sequence[int]], None] = lambda ranks: None) -> None:
        """All that can come. `after` gets ranks that have been built."""
        while self.ranks.lost(self.role):
            with self.groups.restart(self.role) as ranks:  # broken off, by a Ctrl-C too, they are lost as before
                for report in self._reports(ranks, step, after):
                    as_built_check.check_same_again(self.built[report.rank], report)
        if self.groups.come(self.role):
            with self.groups.take_in(self.role) as ranks:
                self._build_late(ranks, step, after)
            self._tell_of(ranks)

    def metrics(self) -> dict[str, float | int]:
        """Restarts of this attempt so far, and ranks that are lost for good, if there are any."""
        told: dict[str, float | int] = {f"{self.role}/restarts": self.ranks.restarts[self.role]}
        if dropped := self.ranks.dropped(self.role):
            told[f"{self.role}/dropped"] = len(dropped)
        return told

    def ask(self, verb: Verb, body: Body, ranks: Sequence[int], step: int | None) -> Sequence[Message]:
        """Answers of those that are not lost again."""
        call = self.groups[self.role].post(verb, body, step=step, timeout_s=self.start_timeout_s, ranks=ranks)
        try:
            return call.result()
        except RanksLost:
            return [*call.answers.values()]

    def _build_late(self, ranks: Sequence[int], step: int | None, after: Callable[[Sequence[int]], None]) -> None:
        """One that is not what the spec asks for is left out."""
        late = [(rank, self.groups[self.role].take_late(rank)) for rank in ranks]
        reports = [AsBuilt.model_validate(answer.body) for _, answer in late if answer is not None]
        if to_ask := [rank for rank, answer in late if answer is None]:
            reports += self._reports(to_ask, step, after)
        for report in reports:
            try:
                self._admit(report)
            except AsBuiltError as error:
                self.groups.leave_out(Evidence(self.role, report.rank, Cause.RAISED, error.message, needs_log=False))
            else:
                self.built[report.rank] = report

    def _tell_of(self, ranks: Sequence[int]) -> None:
        group = self.groups[self.role]
        if came := [str(rank) for rank in ranks if rank in group.here]:
            who = f"rank{'s' * (len(came) > 1)} {', '.join(came)}"
            total = f"{group.size} of {group.processes} {ROLES[self.role].several}"
            self._tell(f"{self.role} {who} came late and takes part now: {total}")

    def _reports(self, ranks: Sequence[int], step: int | None, after: Callable[[Sequence[int]], None]) -> list[AsBuilt]:
        """What those that are not lost again have built."""
        answers = self.ask(Verb.BUILD, self.body, ranks, step)
        after(ranks)
        return [AsBuilt.model_validate(answer.body) for answer in answers]


class TimeSpent:
    """Seconds that bringing ranks back has taken, of whatever role."""

    def __init__(self) -> None:
        self._seconds = 0.0

    @contextmanager
    def measured(self) -> Iterator[None]:
        before, started = self._seconds, time.perf_counter()
        try:
            yield
        finally:  # what was measured inside is part of this
            self._seconds = before + time.perf_counter() - started

    def take(self) -> float:
        """Since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds


class SteadyGrading:
    """Brings back what was lost of the reward role, while the others grade."""

    def __init__(self, returns: Returns, spent: TimeSpent) -> None:
        """`spent`: of all roles; `SteadySync` says how much that was."""
        self.returns, self.spent = returns, spent

    def restore(self, step: int) -> bool:
        """Before a step. Whether there are new ranks to grade."""
        if not self.returns.due:
            return False
        with self.spent.measured():
            self.returns.bring_back(step)
        return True

    def metrics(self) -> dict[str, float | int]:
        group = self.returns.groups[REWARD]
        return {} if group.processes == 1 else {**self.returns.metrics(), "reward/processes": group.size}


class SteadySync:
    """Weight sync that brings lost samplers back."""

    def __init__(
        self, residency: Residency, weights: WeightSync, returns: Returns, spent: TimeSpent | None = None
    ) -> None:
        """`spent` is shared with what else brings ranks back."""
        self.groups, self.residency, self.weights, self.returns = returns.groups, residency, weights, returns
        self.ranks, self.spent = returns.ranks, spent or TimeSpent()

    def run(self, step: int | None = None) -> SyncReport:
        """A verified sync to every replica, in the phase "sync". Replicas that are lost, also on the way, are brought
        back for it, and late ones that have come are taken in. Raises what `WeightSync.run` raises, and RoleFailure
        when the restarts are used up."""
        while True:
            if self.returns.due:
                with self.spent.measured():
                    self._bring_back(step)
            try:
                return self.weights.run(step)
            except RanksLost:
                with self.spent.measured():
                    self.weights.break_off(step)

    def restore(self, step: int | None) -> None:
        """If samplers are lost, have them all back with the actor's weights, and every role where it was."""
        phase = self.residency.phase
        assert phase is not None, "a phase comes first"
        while self.ranks.lost(ROLLOUT):
            with self.spent.measured():
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
        """Restarts of replicas in this attempt so far, and seconds spent on those of all roles since the last call."""
        told = {**self.returns.metrics(), "time/restart_s": self.spent.take()}
        if self.ranks.policy_of(ROLLOUT).least is not None:
            here = self.groups[ROLLOUT].size
            told |= {"rollout/replicas": here, "rollout/late": len(self.ranks.late(ROLLOUT))}
        return told

    def _bring_back(self, step: int | None) -> None:
        self.residency.enter("build", step=step)
        self.returns.bring_back(step, lambda ranks: self._leave_device(ranks, step))
        self.weights.forget_readers()
        self.residency.enter("sync", step=step)

    def _leave_device(self, ranks: Sequence[int], step: int | None) -> None:
        if self.residency.shared:
            self.returns.ask(Verb.SLEEP, Sleep(level=SLEEP_LEVEL), ranks, step)
