"""Roles as groups of ranks. The driver calls a verb on a group, one at a time, and gets an answer from every rank; it
hears of any rank's failure wherever it waits.

Who is there: `membership.py`. What is in flight: `group.py`. Who is to blame: `failure_watch.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from rlctl.processes.channel import Event, Hub, Member, Silent
from rlctl.processes.failure_watch import FailureWatch
from rlctl.processes.failures import Evidence
from rlctl.processes.group import Channel, Group
from rlctl.processes.launch import Launcher, Place
from rlctl.processes.membership import Membership
from rlctl.processes.placement import LOOPBACK, Plan
from rlctl.processes.rank_states import RankState
from rlctl.processes.stall_watch import StallWatch
from specs.errors import Cause, ChannelError
from specs.wire.bodies import ErrorBody, read
from specs.wire.heartbeat import Activity, Moving
from specs.wire.messages import Kind, parse

_TICK_S = 0.1


class Groups:
    """The processes of a run, by role. As a context manager it ends them all.

    `on_tick` is called at least every 100 ms while waiting, and may raise (a person's Ctrl-C). Use from the
    main thread.
    """

    def __init__(
        self,
        plan: Plan,
        log_dir: Path,
        *,
        start_timeout_s: float = 300.0,
        verb_timeout_s: float = 1800.0,
        heartbeat_timeout_s: float = 30.0,
        stall_timeout_s: float = 600.0,
        on_tick: Callable[[], None] | None = None,
    ) -> None:
        self.plan = plan
        self.hub = Hub(heartbeat_timeout_s=heartbeat_timeout_s, host=plan.address or LOOPBACK)
        self.launcher = Launcher(log_dir, self.hub.environment(), plan.cluster)
        self.membership = Membership(plan, self.hub, self.launcher)
        self.ranks = self.membership.states
        self.watch = StallWatch(stall_timeout_s)
        self._channel = Channel(self.hub, self.ranks, self.watch, self.tick, verb_timeout_s)
        self._groups = {role.role: Group(role.role, role.processes, self._channel) for role in plan.roles}
        self.failures = FailureWatch(self.membership, self._groups, self.watch, self._pump)
        self._start_timeout_s = start_timeout_s
        self._on_tick, self._ticked_at = on_tick, 0.0
        self._closed = False

    def __getitem__(self, role: str) -> Group:
        return self._groups[role]

    def __enter__(self) -> Groups:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(polite=kind is None)

    def take_busy(self) -> list[tuple[float, float]]:
        """Return when ranks were at work since the last call, in no order (seconds of the monotonic clock)."""
        taken = [*self._channel.busy]
        self._channel.busy.clear()
        return taken

    def moving(self) -> Moving:
        """Return how far the verbs in flight are."""
        return self.watch.moving(self.failures.waiting())

    def start(self) -> None:
        """Launch every role and wait until every rank has joined. Raise RoleFailure, verb "start"."""
        for plan in self.plan.roles:
            self._let_be_late(self.membership.launch(plan))
        self._wait_for([(plan.role, rank) for plan in self.plan.roles for rank in range(plan.processes)])

    @contextmanager
    def restart(self, role: str) -> Iterator[list[int]]:
        """Start the failed ranks of a role again and wait until they have joined; those that fail again meanwhile are
        not waited for. Verbs in line go to the other ranks first: a new process could not answer them. Yield the ranks.
        They are running again when the block, in which they are built, ends; when it raises they are failed as before.
        Raise RoleFailure as `start` does."""
        self._groups[role].settle(lambda: self.ranks.failed(role))
        ranks = self.ranks.failed(role)
        with self.ranks.building(role, ranks, RankState.RESTARTING):
            with self.ranks.starting(role, ranks):
                for rank in ranks:
                    self.watch.forget((role, rank))
                    self.membership.relaunch(role, rank)
                self._wait_for([(role, rank) for rank in ranks])
            yield ranks

    def arrived(self, role: str) -> list[int]:
        """Return the late ranks of a role that have joined by now."""
        return [rank for rank in self.ranks.late(role) if (role, rank) in self.membership.members]

    @contextmanager
    def join(self, role: str) -> Iterator[list[int]]:
        """Yield the late ranks that have come, to be built in the block; at its end they take part. Those that fail
        meanwhile do not, and when it raises none does."""
        self._groups[role].settle(lambda: self.arrived(role))
        ranks = self.arrived(role)
        with self.ranks.building(role, ranks, RankState.JOINING):
            yield ranks

    def leave_out(self, evidence: Evidence) -> None:
        """Go on without a rank that never took part and cannot, or end the run because of it."""
        self.failures.assess(evidence, unbuilt=True)
        self.tick(0)

    def tick(self, timeout_s: float = _TICK_S) -> None:
        """Wait up to `timeout_s` for something to happen and handle it. Raise RoleFailure."""
        self._pump(timeout_s)
        self.failures.check()
        if self._on_tick is not None and time.monotonic() - self._ticked_at >= _TICK_S / 2:
            self._ticked_at = time.monotonic()
            self._on_tick()

    def close(self, *, polite: bool = True) -> None:
        """End every process. `polite`: where none is gone or overdue, ask with the verb `close` first. A second call
        does nothing."""
        if not self._closed:
            self._closed = True
            polite = polite and not self.failures.overdue and not self.ranks.any_in(RankState.FATAL)
            self.membership.close(polite=polite)

    def _wait_for(self, places: Sequence[Place]) -> None:
        started = time.monotonic()
        while absent := [place for place in places if self.membership.is_awaited(place)]:
            if time.monotonic() > started + self._start_timeout_s and not self.ranks.any_in(RankState.FAILING):
                hint = "raise run.start_timeout_s if it is only slow"
                message = f"did not join within {self._start_timeout_s:g} s"
                self._let_be_late([Evidence(*place, Cause.OVERDUE, message, hint=hint) for place in absent])
            self.tick()

    def _let_be_late(self, absent: Sequence[Evidence]) -> None:
        """Go on without ranks that are not there, or raise RoleFailure for one that is needed."""
        for evidence in [one for one in absent if not self.membership.let_be_late(one)][:1]:
            raise self.failures.failure(evidence)

    def _pump(self, timeout_s: float) -> None:
        """Handle what has arrived; wait up to `timeout_s` for it."""
        event = self.hub.next(min(timeout_s, _TICK_S))
        while event is not None:
            self._handle(event)
            event = self.hub.next_queued()

    def _handle(self, event: Event) -> None:
        if isinstance(event, Member):
            self.membership.join(event)
            self.watch.moved()
            return
        if isinstance(event, Silent):
            self.failures.heard_nothing(event)
            return
        place = event.role, event.rank
        try:
            message = parse(event.frames)
            if message.kind is Kind.BEAT:
                self.watch.heard(place, read(Activity, message))
                return
            error = ErrorBody.of(message) if message.kind is Kind.ERROR else None
        except ChannelError as broken:
            self.failures.heard_garbage(*place, broken)
            return
        self.watch.moved()
        if message.kind is Kind.DUMPED:
            self.failures.heard_dump(place)
        elif error is not None:
            self.failures.heard_error(*place, message, error)
        else:
            self._groups[event.role].receive(event.rank, message)
