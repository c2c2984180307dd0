"""A sampler that was lost comes back: started again, built, given the actor's weights anew, and verified.

Only replicas of the rollout: each is a process of its own that nobody computes with, and all that it knows comes from
the spec and from the next sync. What it had finished stands; what it had not is sampled again
(rlctl/loop/sampling.py), to the same tokens where the engine's randomness depends on seed and sample alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rlctl.loop.residency import SLEEP_LEVEL
from rlctl.models import as_built_check
from rlctl.processes.calls import Body, RanksLost
from rlctl.processes.rank_states import RestartPolicy
from specs.schema.metric import Metric
from specs.wire.as_built import AsBuilt
from specs.wire.bodies import Sleep
from specs.wire.messages import Message, Verb

if TYPE_CHECKING:
    from rlctl.loop.residency import Residency
    from rlctl.loop.sync import SyncReport, WeightSync
    from rlctl.processes.failures import Evidence
    from rlctl.processes.groups import Groups

ROLLOUT = "rollout"

METRICS: tuple[Metric, ...] = (
    Metric(name="rollout/restarts", meaning="Replicas started anew, in this attempt so far."),
    Metric(name="time/restart_s", unit="s", meaning="Bringing lost replicas back, since the last step."),
    Metric(name="rollout/dropped", meaning="Replicas that are lost for good.", when="there are any"),
)


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
        far: Mapping[int, str] | None = None,
        start_timeout_s: float,
        warn: Callable[[str], None],
    ) -> None:
        """`body` is what the rollout was told to build, `built` what its ranks reported. The run
        goes on with `least` of them; `far`: rank → host of those on other hosts (rlctl/processes/rank_states.py)."""
        self.groups, self.residency, self.weights = groups, residency, weights
        self.body, self.built, self.start_timeout_s = body, built, start_timeout_s
        self._warn = warn
        self.ranks = groups.ranks
        self._far = far or {}
        self.ranks.allow_restarts(RestartPolicy(ROLLOUT, limit, self._say, least, frozenset(self._far)))
        self._seconds = 0.0

    def run(self, step: int | None = None) -> SyncReport:
        """A verified sync to every replica, in the phase "sync". Replicas that are lost, also on the way, are brought
        back for it. Raises what `WeightSync.run` raises, and RoleFailure when the restarts are used up."""
        while True:
            if self.ranks.lost(ROLLOUT):
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
        return told

    def _bring_back(self, step: int | None) -> None:
        self.residency.enter("build", step=step)
        while self.ranks.lost(ROLLOUT):
            with self.groups.restart(ROLLOUT) as ranks:  # broken off, by a Ctrl-C too, they are lost as before
                self._build(ranks, step)
        self.weights.forget_readers()
        self.residency.enter("sync", step=step)

    def _build(self, ranks: Sequence[int], step: int | None) -> None:
        for answer in self._ask(Verb.BUILD, self.body, ranks, step):
            report = AsBuilt.model_validate(answer.body)
            as_built_check.check_same_again(self.built[report.rank], report)
        if self.residency.shared:
            self._ask(Verb.SLEEP, Sleep(level=SLEEP_LEVEL), ranks, step)

    def _ask(self, verb: Verb, body: Body, ranks: Sequence[int], step: int | None) -> Sequence[Message]:
        """Answers of those that are not lost again."""
        call = self.groups[ROLLOUT].post(verb, body, step=step, timeout_s=self.start_timeout_s, ranks=ranks)
        try:
            return call.result()
        except RanksLost:
            return [*call.answers.values()]

    def _say(self, lost: Evidence) -> None:
        if lost.rank in self.ranks.dropped(ROLLOUT):
            here, host = self.groups[ROLLOUT].size, self._far.get(lost.rank, "")
            self._warn(
                f"{lost.role} rank {lost.rank}{f' on {host}' if host else ''} is lost for good: {lost.message}. "
                f"The run goes on with {here} of them (rollout.min_processes = {self.ranks.policy.least})"
            )
            return
        restart, limit = self.ranks.restarts + len(self.ranks.lost(ROLLOUT)), self.ranks.policy.limit
        log_path = self.groups.launcher.log_path(lost.role, lost.rank)
        self._warn(
            f"{lost.role} rank {lost.rank} was lost: {lost.message}. It is started again (restart {restart} of at most "
            f"{limit}, rollout.max_restarts); log: {log_path}"
        )

    @contextmanager
    def _timed(self) -> Iterator[None]:
        before, started = self._seconds, time.perf_counter()
        try:
            yield
        finally:  # what was timed inside is part of this
            self._seconds = before + time.perf_counter() - started
