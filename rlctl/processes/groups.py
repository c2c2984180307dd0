"""Roles as groups of ranks. The driver calls a verb on a group, one at a time, and gets an answer from every rank; it
hears of any rank's failure wherever it waits."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import TypedDict, Unpack

import psutil

from rlctl.processes.calls import Blobs, Bodies, Call, frames_by_rank
from rlctl.processes.channel import Event, Hub, Joined, Silent
from rlctl.processes.failures import (
    JOINED_VERBS,
    LAUNCHER_GRACE_S,
    ROOT_CAUSE_GRACE_S,
    Blame,
    Evidence,
    HeldErrors,
    first_to_end,
    from_end,
    from_error,
    from_rank_end,
    perhaps_first,
)
from rlctl.processes.handshake import Member
from rlctl.processes.late_hosts import LateHosts
from rlctl.processes.launch import Launcher, tail
from rlctl.processes.placement import LOOPBACK, Plan
from rlctl.processes.rank_processes import RankProcesses
from rlctl.processes.rank_states import Place, RankState, RankStates
from rlctl.processes.stall_watch import Stall, StallWatch, Waiting
from specs.errors import Cause, ChannelError, RoleFailure
from specs.schema.roles import ROLES
from specs.wire.error_body import ErrorBody
from specs.wire.heartbeat import FLIGHT_RECORDER, Activity, Moving
from specs.wire.messages import Kind, Message, Verb, parse

_TICK_S = 0.1
_EXIT_GRACE_S = 0.5  # a rank that ends by itself may have said why: let that message arrive
_STACKS_S = 3.0  # for a rank without a sign of life to write where it is into its log
_WRITTEN_S = 0.1  # without another line: it has written all
_DUMP_S = 3.0  # for the others to do so and say that it is done
# Roles whose ranks wait for each other in `JOINED_VERBS`.
_IN_A_SYNC = frozenset(role.name for role in ROLES.values() if role.holds_model)


class Terms(TypedDict, total=False):
    """Options of `Group.post` that `Group.call` takes too."""

    step: int | None  # the RL step that it is part of: for the message when it fails
    timeout_s: float | None  # seconds until a rank must have answered; unset: `run.verb_timeout_s`
    ranks: Sequence[int] | None  # only these; unset: all


class Group:
    """All ranks of one role. A rank serves one verb at a time; further ones wait in line."""

    def __init__(self, role: str, size: int, groups: Groups) -> None:
        self.role, self.processes = role, size  # of all that were asked for
        self.line: deque[Call] = deque()  # in the order in which they were posted, also those in flight
        self._groups = groups
        self.used_GiB = 0.0  # the most device memory that any rank has reported, from before it built its model on
        self._number = 0
        self._postponed: dict[int, Call] = {}  # by rank: a verb of which its answer is no longer waited for, but heard

    @property
    def here(self) -> list[int]:
        """Ranks that take part, by which a replica is known however many there are: all but those that were dropped,
        and those that are late."""
        absent = self._groups.ranks.absent(self.role)
        return [rank for rank in range(self.processes) if rank not in absent]

    @property
    def size(self) -> int:
        """How many take part."""
        return len(self.here)

    @property
    def ready(self) -> list[int]:
        """Ranks that take part and are not lost, nor about to be built again."""
        return self._groups.ranks.running(self.role)

    @property
    def in_flight(self) -> list[Call]:
        return [call for call in self.line if call.sent]

    def call(self, verb: Verb, body: Bodies = None, tensors: Blobs = None, **terms: Unpack[Terms]) -> list[Message]:
        """Ask every rank and wait; answers by rank. A single body or tensors go to all of them, a list one to each.

        Raises RoleFailure, RanksLost, and BatchError when a column that the verb needs is not there.
        """
        return self.post(verb, body, tensors, **terms).result()

    def post(
        self,
        verb: Verb,
        body: Bodies = None,
        tensors: Blobs = None,
        *,
        step: int | None = None,
        timeout_s: float | None = None,
        ranks: Sequence[int] | None = None,
        on_part: Callable[[Message], None] | None = None,
        on_done: Callable[[Call], None] | None = None,
    ) -> Call:
        """As `call`, without waiting. The deadline counts from when the verb is sent, not from when it got in line.

        `on_part` gets each PART as it arrives, while the driver waits for whichever role. `on_done` gets the call when
        every rank has answered, or will not. Both may post, but not wait.
        """
        groups = self._groups
        self._number += 1
        ranks = self.here if ranks is None else ranks
        frames = frames_by_rank(verb, self._number, len(ranks), body, tensors)
        timeout_s = timeout_s or groups.verb_timeout_s
        call = Call(verb, self._number, frames, step, timeout_s, groups.tick, on_part, ranks, on_done)
        self.line.append(call)
        self.send_next()
        return call

    def send_next(self) -> None:
        """Send what is in line to ranks that serve nothing that was posted before it."""
        while (call := self._next()) is not None:
            states = self._groups.ranks
            lost = states.lost(self.role) + states.dropped(self.role) + states.late(self.role)
            self._groups.watch.moved()
            for rank, frames in zip(call.ranks, call.start(), strict=True):
                if rank in lost:
                    call.lose(rank)
                else:
                    self._groups.hub.send(self.role, rank, frames)
            if call.done:
                self.drop(call)

    def _next(self) -> Call | None:
        taken: set[int] = set()
        for call in self.line:
            if not call.sent and taken.isdisjoint(call.ranks):
                return call
            taken.update(call.ranks)
            if len(taken) >= self.processes:
                return None
        return None

    def sent(self, number: int) -> Call | None:
        """The verb of this number, if it is in flight."""
        for call in self.line:  # no generator: hundreds of answers come here
            if call.number == number:
                return call if call.sent else None
        return None

    def take(self, rank: int, message: Message) -> None:
        """File an answer. One to a call that is over (its verb failed on another rank) is dropped."""
        if (call := self.sent(message.call)) is not None:
            call.take(rank, message)
            self.used_GiB = max(self.used_GiB, float(message.body.get("used_GiB", 0.0)))
            if message.busy is not None:
                self._groups.busy.append(message.busy)
            if call.done:
                self.drop(call)
        elif rank in self._postponed and self._postponed[rank].number == message.call:
            self._postponed[rank].take(rank, message)

    def postpone(self, rank: int) -> None:
        """Wait no longer for a rank's answer to the verb in flight, which may still come (`take_late`)."""
        call = next(call for call in self.in_flight if rank in call.missing)
        self._postponed[rank] = Call(
            call.verb, call.number, [[]], call.step, call.timeout_s, self._groups.tick, None, [rank]
        )
        self.lose(rank)

    def owes(self, rank: int) -> bool:
        """Whether the answer to a postponed verb is still to come."""
        return rank in self._postponed and not self._postponed[rank].done

    def take_late(self, rank: int) -> Message | None:
        """What a rank answered to a postponed verb; None: none was postponed."""
        late = self._postponed.pop(rank, None)
        return None if late is None else late.answers[rank]

    def lose(self, rank: int, number: int | None = None) -> None:
        """The verb in flight (only if it has this number) gets no answer from a rank."""
        for call in self.in_flight:
            if number in (None, call.number) and rank in call.missing:
                call.lose(rank)
                if call.done:
                    self.drop(call)

    def tick(self) -> None:
        """Wait a moment for something to happen to any role. Raises RoleFailure."""
        self._groups.tick()

    def settle(self, ranks: Callable[[], Sequence[int]] | None = None) -> None:
        """Wait until no verb is in flight or in line, or none for any of these `ranks`."""
        while any(ranks is None or not set(ranks()).isdisjoint(call.ranks) for call in self.line):
            self._groups.tick()

    def drop(self, call: Call) -> None:
        """A verb in flight is over."""
        self.line.remove(call)
        if call.on_done is not None and call.done:
            call.on_done(call)
        self.send_next()


class Groups:
    """The processes of a run, by role. As a context manager it ends them all.

    `on_tick` is called at least every 100 ms while waiting, and may raise (a person's Ctrl-C). `modules` names
    "module:function" for roles whose handlers are not `workers/roles/<role>.py`. Use from the main thread.
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
        modules: Mapping[str, str] | None = None,
        hub: Hub | None = None,
    ) -> None:
        self.plan = plan
        self.hub = hub or Hub(heartbeat_timeout_s=heartbeat_timeout_s, host=plan.address or LOOPBACK)
        self.verb_timeout_s = verb_timeout_s
        self.members: dict[tuple[str, int], Member] = {}
        self.busy: list[tuple[float, float]] = []  # when ranks were at work, in no order
        self.launcher = Launcher(log_dir, self.hub.environment())
        self._start_timeout_s = start_timeout_s
        self._on_tick = on_tick
        self._modules = dict(modules or {})
        self._groups: dict[str, Group] = {role.role: Group(role.role, role.processes, self) for role in plan.roles}
        self._blame = Blame()
        self.watch = StallWatch(stall_timeout_s)
        self._dumped: dict[Place, str] = {}  # who has written its stacks since that was asked for, and which file
        self.ranks = RankStates()  # no restarts unless allowed (rlctl/loop/recovery.py)
        self._held = HeldErrors()
        self._ended: set[str] = set()
        self._below_launchers = RankProcesses()
        self._ended_first: dict[str, list[int]] = {}  # role → of ranks below a launcher, those seen to end first
        self._ticked_at = self._looked_at = 0.0
        self._dropped_at = 0.0  # when a rank was dropped last: verbs sent before that may fail for its sake
        self._closed = False
        self._overdue = False  # a rank did not answer in time
        self._late_hosts = LateHosts(plan.unreached, self._start_late, self._tell_late)

    def __getitem__(self, role: str) -> Group:
        return self._groups[role]

    def __contains__(self, role: str) -> bool:
        return role in self._groups

    def __enter__(self) -> Groups:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(polite=kind is None)

    def take_busy(self) -> list[tuple[float, float]]:
        """When ranks were at work since the last call, in no order (seconds of the monotonic clock)."""
        taken, self.busy = self.busy, []
        return taken

    def start(self, names: Sequence[str] | None = None) -> None:
        """Launch roles (unset: all) and wait until every rank has proven itself. Raises RoleFailure, verb "start"."""
        chosen = [plan for plan in self.plan.roles if names is None or plan.role in names]
        for plan in chosen:
            self.hub.expect(plan.role, plan.processes)
            missing = {
                rank: host for rank in range(plan.processes) if (host := plan.host_of(rank)) in self.plan.unreached
            }
            self.launcher.start(plan, module=self._modules.get(plan.role, ""), but=missing)
            self.ranks.started(plan.role, plan.processes)
            for rank, host in missing.items():
                self._late_hosts.await_rank(host, (plan.role, rank))
                told = f"is not there: {self.plan.unreached[host].why}"
                evidence = Evidence(plan.role, rank, Cause.OVERDUE, told, needs_log=False)
                if not self._let_be_late(evidence):
                    raise self._failure(evidence)
        self._wait_for([(plan.role, rank) for plan in chosen for rank in range(plan.processes)])

    @contextmanager
    def restart(self, role: str) -> Iterator[list[int]]:
        """Start the lost ranks of a role again and wait until they have proven themselves; those that are lost again
        meanwhile are not waited for. Verbs in line go to the other ranks first: a new process could not answer them.
        Gives the ranks. They are running again when the block, in which they are built, ends; when it raises they are
        lost as before. Raises RoleFailure as `start` does."""
        self._groups[role].settle(lambda: self.ranks.lost(role))
        ranks = self.ranks.begin_restart(role)
        finished = False
        try:
            for rank in ranks:
                self._start_again(role, rank)
            self._wait_for([(role, rank) for rank in ranks])
            yield ranks
            finished = True
        finally:
            self.ranks.end_restart(role, ranks, finished=finished)

    def come(self, role: str) -> list[int]:
        """Late ranks of a role that are here now: joined, and done with what they were asked before."""
        group = self._groups[role]
        return [rank for rank in self.ranks.late(role) if (role, rank) in self.members and not group.owes(rank)]

    @contextmanager
    def take_in(self, role: str) -> Iterator[list[int]]:
        """Late ranks that have come, to be built in the block; at its end they take part. Those that are lost meanwhile
        do not, and when it raises none does."""
        self._groups[role].settle(lambda: self.come(role))
        ranks = self.come(role)
        self.ranks.begin_taking_in(role, ranks)
        finished = False
        try:
            yield ranks
            finished = True
        finally:
            self.ranks.end_taking_in(role, ranks, finished=finished)

    def leave_out(self, evidence: Evidence) -> None:
        """A rank that never took part cannot: the run goes on without it, or ends for its sake."""
        self._assess(evidence, unbuilt=True)
        self.tick(0)

    def _start_again(self, role: str, rank: int) -> None:
        self.launcher.kill(role, rank)  # there is one where a restart was broken off
        self.members.pop((role, rank), None)
        self.watch.forget((role, rank))
        self.hub.forget(role, rank)
        remark = f"{role} rank {rank} is started again"
        self.launcher.start_again(self.plan.role(role), rank, module=self._modules.get(role, ""), remark=remark)

    def _wait_for(self, places: Sequence[Place]) -> None:
        started = time.monotonic()
        while absent := [place for place in places if self._is_awaited(place)]:
            if time.monotonic() > started + self._start_timeout_s and not self.ranks.any_in(RankState.LEAVING):
                hint = "raise run.start_timeout_s if it is only slow"
                told = f"did not join within {self._start_timeout_s:g} s"
                late = [Evidence(*place, Cause.OVERDUE, told, hint=hint) for place in absent]
                if needed := [one for one in late if not self._let_be_late(one)]:
                    raise self._failure(needed[0])
            self.tick()

    def _is_awaited(self, place: Place) -> bool:
        nobody = (RankState.LOST, RankState.DROPPED, RankState.LATE)
        return place not in self.members and self.ranks[place] not in nobody

    def _let_be_late(self, evidence: Evidence) -> bool:
        """Whether the run goes on without a rank until it comes."""
        late = self.ranks.let_be_late((evidence.role, evidence.rank))
        if late:
            self.ranks.policy_of(evidence.role).on_loss(evidence)
        return late

    def tick(self, timeout_s: float = _TICK_S) -> None:
        """Wait up to `timeout_s` for something to happen and handle it. Raises RoleFailure."""
        event = self.hub.next(min(timeout_s, _TICK_S))
        while event is not None:
            self._handle(event)
            event = self.hub.next(0)
        self._check_exits()
        self._late_hosts.look()
        self._handle_losses()
        self._check_deadlines()
        self._check_progress()
        self.launcher.keep_lines_open()
        if root := self._blame.root_cause():
            raise self._failure(root)
        if self._on_tick is not None and time.monotonic() - self._ticked_at >= _TICK_S / 2:
            self._ticked_at = time.monotonic()
            self._on_tick()

    def close(self, *, polite: bool = True, grace_s: float = 10.0) -> None:
        """End every process. `polite`: where none is gone or overdue, ask with the verb `close` first. A second call
        does nothing."""
        if self._closed:
            return
        self._closed = True
        self._late_hosts.close()
        if polite and not self._overdue and not self.ranks.any_in(RankState.GONE):
            for late in [(role, rank) for role in self._groups for rank in self.ranks.late(role)]:
                self.launcher.give_up(*late)  # it may hear nothing yet
            for role, rank in self.members:
                self.hub.send(role, rank, Message(Kind.CALL, verb=Verb.CLOSE).frames())
            self.launcher.wait(grace_s)
        self.launcher.stop()
        self.hub.close()

    # ── what happens while waiting ────────────────────────────────────────────────────────────────

    def _handle(self, event: Event) -> None:
        if isinstance(event, Joined):
            place = event.member.role, event.member.rank
            self.members[place] = event.member
            self.ranks.joined(place)
            self._late_hosts.joined(place)
            for started in self.launcher.started:
                launcher = started.process
                if (
                    started.is_launcher
                    and isinstance(launcher, subprocess.Popen)
                    and place[0] == started.role
                    and place[1] in started.ranks
                ):
                    self._below_launchers.watch(place, event.member.pid, launcher.pid)
            self.watch.moved()
            return
        if isinstance(event, Silent):
            self._signal_for_stacks((event.role, event.rank))
            silent = f"no sign of life for {event.seconds:.1f} s: it hangs, or was stopped"
            self._assess(Evidence(event.role, event.rank, Cause.SILENT, silent))
            return
        try:
            message = parse(event.frames)
            if message.kind is Kind.BEAT:
                self.watch.heard((event.role, event.rank), Activity.from_json(message.body))
                return
            error = ErrorBody.from_json(message.body) if message.kind is Kind.ERROR else None
        except ChannelError as broken:
            self._blame.add(Evidence(event.role, event.rank, Cause.RAISED, broken.message))
            return
        self.watch.moved()
        if message.kind is Kind.DUMPED:
            self._dumped[event.role, event.rank] = str(message.body.get("file", ""))
        elif error is not None:
            self._handle_error(event.role, event.rank, message, error)
        else:
            self._groups[event.role].take(event.rank, message)

    def _handle_error(self, role: str, rank: int, message: Message, error: ErrorBody) -> None:
        group = self._groups[role]
        of_now = group.sent(message.call) is not None
        unbuilt = message.call == 0 or message.verb is Verb.BUILD
        if unbuilt and self.ranks[role, rank] is RankState.LATE:
            self._assess(from_error(role, rank, error, alone=True), unbuilt=True)
        elif of_now or message.call == 0:  # 0: the role could not be made; others: of a verb that has failed already
            joined = message.verb in JOINED_VERBS
            alone = self.plan.role(role).world_size_of_group == 1 and not joined
            evidence = from_error(role, rank, error, alone=alone)
            if joined and evidence.is_secondary:
                self._held.hold(evidence, message.call, self._grace_s([plan.role for plan in self.plan.roles]))
            else:
                self._assess(evidence, blame_s=self._grace_s([role]), unbuilt=unbuilt)

    def _grace_s(self, roles: Sequence[str]) -> float:
        """How long a rank's error waits for the end of another rank of these roles."""
        seen_at_once = (
            plan.launcher == "python" or all((role, rank) in self._below_launchers for rank in range(plan.processes))
            for role in roles
            for plan in [self.plan.role(role)]
        )
        return ROOT_CAUSE_GRACE_S if all(seen_at_once) else LAUNCHER_GRACE_S

    def _check_exits(self) -> None:
        ended: dict[str, dict[int, int | None]] = {}
        for (role, rank), code in self._below_launchers.newly_ended():
            ended.setdefault(role, {})[rank] = code
        for role, codes in ended.items():
            if role not in self._ended_first:  # later ones follow from these: their launcher ends them
                self._ended_first[role] = list(codes)
                rank = first_to_end(codes)
                blame_s = LAUNCHER_GRACE_S if codes[rank] is None else _EXIT_GRACE_S
                others = perhaps_first(codes, rank)
                self._assess(from_rank_end(role, rank, codes[rank], others=others), _EXIT_GRACE_S, blame_s)
        for started in [*self.launcher.started]:
            code = started.process.poll()
            if code is not None and started.mark not in self._ended:
                self._ended.add(started.mark)
                evidence = from_end(started, code, self._ended_first.get(started.role, ()))
                place = started.role, started.ranks[0]
                if self._late_hosts.ended(place, f"did not come: {evidence.message}"):
                    self.launcher.give_up(*place)
                else:
                    self._assess(evidence, _EXIT_GRACE_S)

    def _start_late(self, place: Place) -> None:
        role, rank = place
        self.launcher.seek(self.plan.role(role), rank, module=self._modules.get(role, ""))

    def _tell_late(self, place: Place, why: str) -> None:
        started = self.launcher.log_path(*place).exists()
        self.ranks.policy_of(place[0]).on_loss(Evidence(*place, Cause.OVERDUE, why, needs_log=started))

    def _assess(self, evidence: Evidence, grace_s: float = 0.0, blame_s: float = 0.0, *, unbuilt: bool = False) -> None:
        """Either the loss of a rank that will be started again or left out, which counts after `grace_s`, or a failure
        that ends the run, after `blame_s` where a better cause may come. `unbuilt`: the rank could not be built."""
        if not self.ranks.failed(evidence, grace_s, unbuilt=unbuilt):
            self._blame.add(evidence, blame_s or grace_s or ROOT_CAUSE_GRACE_S)

    def _handle_losses(self) -> None:
        lost = self.ranks.newly_lost()
        for evidence in lost:
            self.launcher.kill(evidence.role, evidence.rank)
            self.watch.moved()
            self._groups[evidence.role].lose(evidence.rank)
            if evidence.rank in self.ranks.dropped(evidence.role):
                self._dropped_at = time.monotonic() if evidence.role in _IN_A_SYNC else self._dropped_at
                self.hub.expect_no_more(evidence.role, evidence.rank)
            self.ranks.policy_of(evidence.role).on_loss(evidence)
        self._tell_of_loss(anew=any(evidence.role in _IN_A_SYNC for evidence in lost))
        calls = [call for group in self._groups.values() if group.role in _IN_A_SYNC for call in group.in_flight]
        explained = any(call.lost or call.sent_before(self._dropped_at) for call in calls)
        if self.ranks.any_in(RankState.LOST, roles=_IN_A_SYNC) or explained:
            for error, call in self._held.take_all():
                self._groups[error.role].lose(error.rank, call)
        elif not self.ranks.any_in(RankState.LEAVING):
            for error in self._held.take_due():
                self._blame.add(error)

    def _tell_of_loss(self, *, anew: bool) -> None:
        """Let go those that would wait for a lost rank: the connection to a host whose network is down does not end."""
        flying = [(group, call) for group in self._groups.values() for call in group.in_flight]
        joined = [(group, call) for group, call in flying if call.verb in JOINED_VERBS]
        if not anew and not any(call.lost for _, call in joined):
            return
        for group, call in joined:
            if not call.told_of_loss:
                call.told_of_loss = True
                for rank in call.missing:
                    self.hub.send(group.role, rank, Message(Kind.PEER_LOST, call=call.number).frames())

    def _check_deadlines(self) -> None:
        if self._blame.pending:
            return
        flying = [(group, call) for group in self._groups.values() for call in group.in_flight]
        for group, call in flying:
            if call.overdue and not self._goes_on_without(group, call):
                late = [(group.role, rank) for rank in call.missing]
                missing = {place: one for place, one in self._waiting().items() if place in late}
                self._overdue = True
                stall = self.watch.chain(missing)
                self._dump(missing)
                told = f"no answer within {call.timeout_s:g} s: {stall.chain}"
                self._blame.add(Evidence(*stall.culprits[0], Cause.OVERDUE, told))

    def _goes_on_without(self, group: Group, call: Call) -> bool:
        """Whether the ranks that have not answered in time are replicas that are not built yet, and may be late. On
        shared devices there is no room for one that comes by itself: it is left out."""
        if call.verb is not Verb.BUILD:
            return False
        for rank in call.missing:
            told = f"was not built within {call.timeout_s:g} s"
            evidence = Evidence(group.role, rank, Cause.OVERDUE, told, hint="raise run.start_timeout_s")
            if self.plan.colocated and ROLES[group.role].holds_model:
                if not self.ranks.failed(evidence, unbuilt=True):
                    return False
            elif self._let_be_late(evidence):
                group.postpone(rank)
            else:
                return False
        return True

    def moving(self) -> Moving:
        """How far the verbs in flight are."""
        return self.watch.moving(self._waiting())

    def _waiting(self) -> dict[Place, Waiting]:
        """Everybody who has not answered."""
        return {
            (group.role, rank): Waiting(str(call.verb), call.number, call.step)
            for group in self._groups.values()
            for call in group.in_flight
            for rank in call.missing
        }

    def _check_progress(self) -> None:
        now = time.monotonic()
        if now - self._looked_at < _TICK_S or self._blame.pending or self.ranks.any_in(RankState.LEAVING):
            return
        self._looked_at = now  # with hundreds of ranks not at every answer
        if stall := self.watch.look(waiting := self._waiting()):
            self._dump(waiting)
            told = f"nothing has moved for {self.watch.timeout_s:g} s (run.stall_timeout_s): {stall.chain}"
            for role, rank in self._to_blame(stall):
                self._assess(Evidence(role, rank, Cause.STALLED, told))
            self._overdue = self._blame.pending

    def _to_blame(self, stall: Stall) -> Sequence[Place]:
        """Where all wait for each other, those that can be started again."""
        restartable = [place for place in stall.culprits if self.ranks.may_restart(place)]
        return restartable if restartable and stall.is_circle else stall.culprits

    def _dump(self, places: Iterable[Place]) -> None:
        """Have ranks write their stacks into their logs, from a thread that answers though the main one does not."""
        places = [place for place in places if place in self.members]
        self._dumped.clear()
        for role, rank in places:
            self.hub.send(role, rank, Message(Kind.DUMP).frames())
        deadline = time.monotonic() + _DUMP_S
        while not self._dumped.keys() >= set(places) and time.monotonic() < deadline:
            if (event := self.hub.next(_TICK_S)) is not None:
                self._handle(event)
        for place in places:
            if place not in self._dumped:
                self._signal_for_stacks(place)

    def _signal_for_stacks(self, place: Place) -> None:
        """The same for a rank whose threads do not run: one in native code that holds the interpreter's lock."""
        member = self.members.get(place)
        if member is None or member.host != socket.gethostname():
            return
        log_path = self.launcher.log_path(*place)
        before = _size_of(log_path)
        with suppress(ProcessLookupError, PermissionError):
            os.kill(member.pid, signal.SIGUSR1)
            _wait_until_written(log_path, before, member.pid)

    def _failure(self, evidence: Evidence) -> RoleFailure:
        role, rank = evidence.role, evidence.rank
        group = self._groups[role]
        call = next((call for call in group.in_flight if rank in call.missing), next(iter(group.in_flight), None))
        joined = (role, rank) in self.members
        verb = str(call.verb) if call else "" if joined else "start"
        steps = [call.step for other in self._groups.values() for call in other.in_flight[:1]]
        step = call.step if call else next((step for step in steps if step is not None), None)
        if call is not None and not evidence.permanent:
            group.drop(call)
        log_path = self.launcher.log_path(role, rank)
        if evidence.log_name:
            log_path = log_path.with_name(evidence.log_name)
        return RoleFailure(
            role,
            rank,
            host=self._host_of(role, rank),
            verb=verb,
            step=step,
            cause=evidence.message + self.ranks.remark(role),
            log_path=str(log_path),
            log_tail=tail(log_path) if evidence.needs_log else "",
            dumps=sorted(str(path) for path in log_path.parent.glob(f"{FLIGHT_RECORDER}*")),
            remote_kind=evidence.kind,
            remote_hint=evidence.hint,
        )

    def _host_of(self, role: str, rank: int) -> str:
        """Where a rank of a role on several hosts is; empty for a role on one."""
        plan, member = self.plan.role(role), self.members.get((role, rank))
        here = member.host if member else ""
        return (plan.host_of(rank) or here) if plan.nodes > 1 or plan.remote else ""


def _wait_until_written(path: Path, before: int, pid: int) -> None:
    """Until a log is longer than `before`, and grows no more."""
    size, deadline = before, time.monotonic() + _STACKS_S
    while _can_write(pid) and time.monotonic() < deadline:
        time.sleep(_WRITTEN_S)
        last, size = size, _size_of(path)
        if before < last == size:
            return


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _can_write(pid: int) -> bool:
    """Whether a process has neither ended nor been stopped."""
    try:
        return bool(psutil.Process(pid).status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE))
    except psutil.Error:
        return False
