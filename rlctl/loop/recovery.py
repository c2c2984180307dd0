"""Restore failed replicas: start them again, build them, give them the actor's weights again, and verify them. Do the
same for processes of the reward role, which have no weights.

Only these can be restored: each is a process of its own, and all that it knows comes from the spec and from the next
sync. What it had finished stays; what it had not is sampled again (rlctl/loop/sampling.py), to the same tokens where
the engine's randomness depends on seed and sample alone, or graded by others (rlctl/loop/scores/graders.py).

With `min_processes` a run also begins without those that are not there in time. A replica that comes later is built
before the next sync, and takes part from that sync on; a process of the reward role before the next step, or at once
where no other is left. Each keeps its rank throughout.
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
from rlctl.processes.calls import Body, RanksFailed, answers_of
from rlctl.processes.failures import Evidence
from rlctl.processes.launch import tail
from rlctl.processes.rank_states import RestartPolicy
from specs.errors import AsBuiltError, Cause
from specs.schema.metric import Metric, metrics
from specs.schema.roles import REWARD, ROLES, ROLLOUT
from specs.wire.as_built import AsBuilt
from specs.wire.bodies import Sleep
from specs.wire.messages import Message, Verb

if TYPE_CHECKING:
    from rlctl.loop.residency import Residency
    from rlctl.loop.sync import SyncReport, WeightSync
    from rlctl.processes.groups import Groups

METRICS: tuple[Metric, ...] = (
    *metrics(
        "",
        {
            "rollout/restarts": "Replicas restarted in this attempt so far.",
            "reward/restarts": "Processes of the reward role restarted in this attempt so far.",
            "time/restart_s [s]": "Restoring failed ranks and building late ones, since the last step.",
        },
    ),
    *metrics(
        "there are any",
        {
            "rollout/dropped": "Replicas that failed for good.",
            "reward/dropped": "Processes of the reward role that failed for good.",
        },
    ),
    *metrics(
        "`rollout.min_processes` is set",
        {
            "rollout/replicas": "Replicas that take part.",
            "rollout/late": "Replicas that may still come.",
        },
    ),
    *metrics(
        "`reward.nodes` is above 1",
        {"reward/processes": "Processes of the reward role."},
    ),
)


class FailureWarnings:
    """Warn of each rank that has failed or is late, with what becomes of it."""

    def __init__(self, groups: Groups, warn: Callable[[str], None]) -> None:
        self.groups, self.warn = groups, warn

    def __call__(self, evidence: Evidence) -> None:
        ranks, group = self.groups.ranks, self.groups[evidence.role]
        policy, each = ranks.policy_of(evidence.role), ROLES[evidence.role]
        log_path = self.groups.launcher.log_path(evidence.role, evidence.rank)
        if evidence.log_name:
            log_path = log_path.with_name(evidence.log_name)
        who = f"{evidence.role} rank {evidence.rank}"
        if host := self.groups.membership.host_of(evidence.role, evidence.rank):
            who += f" on {host}"
        least = f"({evidence.role}.min_processes = {policy.least})"
        if evidence.rank in ranks.late(evidence.role):
            why = f"; {_end_of(log_path)}" if evidence.needs_log else ""
            self.warn(
                f"{who} {evidence.message}. The run continues with {group.size} of {group.processes} {each.several} "
                f"{least} and it joins at the {'sync' if each.samples else 'step'} after it comes{why}"
            )
        elif evidence.rank in ranks.dropped(evidence.role):
            why = f"; {_end_of(log_path)}" if evidence.needs_log else ""
            self.warn(
                f"{who} failed for good: {evidence.message}. The run continues with {group.size} of them {least}{why}"
            )
        else:
            restart = ranks.restarts[evidence.role] + len(ranks.failed(evidence.role))
            self.warn(
                f"{who} failed: {evidence.message}. It is started again (restart {restart} of at most {policy.limit}, "
                f"{evidence.role}.max_restarts); log: {log_path}"
            )


def begin_with_fewer(groups: Groups, policy: RestartPolicy) -> None:
    """Let the start continue without ranks that do not come up, as long as there are enough."""
    if policy.least is not None:
        groups.ranks.allow_restarts(replace(policy, limit=0))


def _end_of(log_path: Path) -> str:
    last = tail(log_path, 1).strip()
    return f"log: {log_path}" + (f", which ends in: {last}" if last else "")


class RankRecovery:
    """Restores the failed ranks of a role, and builds late ones."""

    def __init__(
        self,
        groups: Groups,
        policy: RestartPolicy,
        *,
        body: Mapping[str, Any],
        built: Sequence[AsBuilt],
        start_timeout_s: float,
        notify: Callable[[str], None] = lambda text: None,
        admit: Callable[[AsBuilt], None] = lambda report: None,
    ) -> None:
        """`body` is the body of the role's `build`, `built` what its ranks reported. `admit` gets the report of a late
        one, and raises AsBuiltError where it is not what the spec asks for."""
        self.groups, self.role, self.policy = groups, policy.role, policy
        self.body, self.start_timeout_s = body, start_timeout_s
        self.built = {report.rank: report for report in built}
        self._notify, self._admit = notify, admit
        self.ranks = groups.ranks

    def begin(self) -> None:
        """Let failures be mended from now on, instead of ending the run."""
        self.ranks.allow_restarts(self.policy)

    @property
    def due(self) -> bool:
        """Return whether there is any rank to restore or to build."""
        return bool(self.ranks.failed(self.role) or self.groups.arrived(self.role))

    def restore(self, step: int | None, after: Callable[[Sequence[int]], None] = lambda ranks: None) -> None:
        """Restore every rank that can be. `after` gets ranks that have been built."""
        while self.ranks.failed(self.role):
            with self.groups.restart(self.role) as ranks:  # broken off, by a Ctrl-C too, they are failed as before
                for report in self._reports(ranks, step, after):
                    as_built_check.check_same_again(self.built[report.rank], report)
        if self.groups.arrived(self.role):
            with self.groups.join(self.role) as ranks:
                self._build_late(ranks, step, after)
            self._announce(ranks)

    def metrics(self) -> dict[str, float | int]:
        """Return the restarts of this attempt so far, and the ranks that failed for good, if there are any."""
        counts: dict[str, float | int] = {f"{self.role}/restarts": self.ranks.restarts[self.role]}
        if dropped := self.ranks.dropped(self.role):
            counts[f"{self.role}/dropped"] = len(dropped)
        return counts

    def call(self, verb: Verb, body: Body, ranks: Sequence[int], step: int | None) -> Sequence[Message]:
        """Return the answers of ranks that do not fail again."""
        call = self.groups[self.role].post(verb, body, step=step, timeout_s=self.start_timeout_s, ranks=ranks)
        return answers_of(call)

    def _build_late(self, ranks: Sequence[int], step: int | None, after: Callable[[Sequence[int]], None]) -> None:
        """Build late ranks; leave out one that is not what the spec asks for."""
        for report in self._reports(ranks, step, after):
            try:
                self._admit(report)
            except AsBuiltError as error:
                self.groups.leave_out(Evidence(self.role, report.rank, Cause.RAISED, error.message, needs_log=False))
            else:
                self.built[report.rank] = report

    def _announce(self, ranks: Sequence[int]) -> None:
        group = self.groups[self.role]
        if came := [str(rank) for rank in ranks if rank in group.here]:
            who = f"rank{'s' * (len(came) > 1)} {', '.join(came)}"
            total = f"{group.size} of {group.processes} {ROLES[self.role].several}"
            self._notify(f"{self.role} {who} came late and takes part now: {total}")

    def _reports(self, ranks: Sequence[int], step: int | None, after: Callable[[Sequence[int]], None]) -> list[AsBuilt]:
        """Return what ranks that do not fail again have built."""
        answers = self.call(Verb.BUILD, self.body, ranks, step)
        after(ranks)
        return [AsBuilt.model_validate(answer.body) for answer in answers]


class TimeSpent:
    """Measures the seconds that restoring ranks takes, of whatever role."""

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
        """Return the seconds since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds


class SteadyGrading:
    """Restores failed graders, while the others grade."""

    def __init__(self, recovery: RankRecovery, spent: TimeSpent) -> None:
        """`spent`: of all roles; `SteadySync` reports how much that was."""
        self.recovery, self.spent = recovery, spent

    def restore(self, step: int) -> bool:
        """Restore failed graders before a step; return True if any joined."""
        if not self.recovery.due:
            return False
        with self.spent.measured():
            self.recovery.restore(step)
        return True

    def metrics(self) -> dict[str, float | int]:
        group = self.recovery.groups[REWARD]
        processes = {"reward/processes": group.size} if group.processes > 1 else {}
        return {**self.recovery.metrics(), **processes}


class SteadySync:
    """Weight sync that restores failed replicas."""

    def __init__(
        self, residency: Residency, weights: WeightSync, recovery: RankRecovery, spent: TimeSpent | None = None
    ) -> None:
        """`spent` is shared with what else restores ranks."""
        self.groups, self.residency, self.weights, self.recovery = recovery.groups, residency, weights, recovery
        self.ranks, self.spent = recovery.ranks, spent or TimeSpent()

    def run(self, step: int | None = None) -> SyncReport:
        """Make a verified sync to every replica, in the phase "sync". Replicas that have failed, also on the way, are
        restored for it, and late ones that have come join. Raise what `WeightSync.run` raises, and RoleFailure when the
        restarts are used up."""
        if self.recovery.due:
            with self.spent.measured():
                self._restore_ranks(step)
        while True:
            try:
                return self.weights.run(step)
            except RanksFailed:
                with self.spent.measured():
                    self.weights.break_off(step)
                    self._restore_ranks(step)  # where none is to be restored, the roles: a probe has moved them

    def restore(self, step: int | None) -> None:
        """If replicas have failed, restore them all with the actor's weights, and every role where it was."""
        phase = self.residency.phase
        assert phase is not None, "a phase comes first"
        while self.ranks.failed(ROLLOUT):
            with self.spent.measured():
                self.run(step)
                self.residency.enter(phase, step=step)

    def resend_if_asleep(self, step: int | None) -> None:
        """Give a rollout that was put to sleep since its last sync the weights again, verified, before it samples."""
        if self.residency.sampler_asleep:
            self.residency.enter("sync", step=step)
            self.run(step)

    def take_metrics(self) -> dict[str, float | int]:
        """Return the restarts of replicas in this attempt so far, and the seconds spent on those of all roles since the
        last call."""
        metrics = {**self.recovery.metrics(), "time/restart_s": self.spent.take()}
        if self.ranks.policy_of(ROLLOUT).least is not None:
            here = self.groups[ROLLOUT].size
            metrics |= {"rollout/replicas": here, "rollout/late": len(self.ranks.late(ROLLOUT))}
        return metrics

    def _restore_ranks(self, step: int | None) -> None:
        self.residency.enter("build", step=step)
        self.recovery.restore(step, lambda ranks: self._leave_device(ranks, step))
        self.weights.forget_readers()
        self.residency.enter("sync", step=step)

    def _leave_device(self, ranks: Sequence[int], step: int | None) -> None:
        if self.residency.shared:
            self.recovery.call(Verb.SLEEP, Sleep(level=SLEEP_LEVEL), ranks, step)
