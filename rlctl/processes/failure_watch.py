"""Find who is to blame: turn what is seen of the ranks into failures that a restart mends, or one that ends the run."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress

import psutil

from rlctl.processes.calls import Call
from rlctl.processes.channel import Silent
from rlctl.processes.failures import (
    JOINED_VERBS,
    LAUNCHER_GRACE_S,
    ROOT_CAUSE_GRACE_S,
    Blame,
    Evidence,
    from_end,
    from_error,
)
from rlctl.processes.group import Group
from rlctl.processes.launch import Place, Started, tail
from rlctl.processes.membership import Membership
from rlctl.processes.node_connection import RemoteProcess
from rlctl.processes.rank_states import RankState
from rlctl.processes.stall_watch import Stall, StallWatch
from specs.errors import Cause, ChannelError, RoleFailure
from specs.schema.roles import ROLES
from specs.wire.bodies import ErrorBody
from specs.wire.heartbeat import FLIGHT_RECORDER
from specs.wire.messages import Kind, Message, Verb

_TICK_S = 0.1
_LOOK_S = 0.05  # between two looks at processes and calls: the driver ticks at every message
_EXIT_GRACE_S = 0.5  # a rank that ends by itself may have sent why: let that message arrive
_STACKS_S = 3.0  # for a rank without a sign of life to write where it is into its log
_WRITTEN_S = 0.1  # without another line: it has written all
_MUTE = (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)  # processes that write nothing
_DUMP_S = 3.0  # for the others to do so and say that it is done
_COMING = (RankState.STARTING, RankState.RESTARTING, RankState.JOINING, RankState.LATE)
# Roles whose ranks wait for each other in `JOINED_VERBS`.
_IN_A_SYNC = frozenset(role.name for role in ROLES.values() if role.holds_model)


class FailureWatch:
    """Watch processes, deadlines and progress. `pump` handles what has arrived, for requested stacks."""

    def __init__(
        self,
        membership: Membership,
        groups: Mapping[str, Group],
        watch: StallWatch,
        pump: Callable[[float], None],
    ) -> None:
        self.overdue = False  # a rank did not answer in time
        self._membership, self._states, self._groups = membership, membership.states, groups
        self._watch, self._pump = watch, pump
        self._blame = Blame()
        self._ended: set[str] = set()  # marks of processes whose end is known
        self._dumped: set[Place] = set()  # ranks that have written their stacks since the request
        self._checked_at = self._progress_at = 0.0
        self._dropped_at = 0.0  # when a rank was dropped last: verbs sent before that may fail because of it

    # ── what arrives ──────────────────────────────────────────────────────────────────────────────

    def heard_error(self, role: str, rank: int, message: Message, error: ErrorBody) -> None:
        """Take in an error of a rank."""
        of_now = self._groups[role].sent(message.call) is not None
        unbuilt = message.call == 0 or message.verb is Verb.BUILD
        if of_now or message.call == 0:  # 0: the role could not be made; others: of a verb that has failed already
            joined = message.verb in JOINED_VERBS
            plan = self._membership.plan.role(role)
            alone = plan.world_size_of_group == plan.nodes_of_rank == 1
            evidence = from_error(role, rank, error, alone=alone, joined_call=message.call if joined else 0)
            roles = [plan.role for plan in self._membership.plan.roles] if joined else [role]
            self.assess(evidence, blame_s=self._grace_s(roles), unbuilt=unbuilt)

    def heard_nothing(self, event: Silent) -> None:
        """Take in that a rank is silent. Where no rank of its host gives a sign of life, host or network are down."""
        place = event.role, event.rank
        host, far = self._membership.host_of(*place), bool(self._membership.plan.role(event.role).host_of(event.rank))
        if silent_host := self._membership.silent_with(*place):
            message = (
                f"no sign of life from host {silent_host} for {event.seconds:.1f} s: it is down, or its network is"
            )
        else:
            self._signal_for_stacks(place)
            cut = f", or the network to {host} is cut" if host else ""
            message = f"no sign of life for {event.seconds:.1f} s: it hangs, or was stopped{cut}"
        self.assess(Evidence(*place, Cause.SILENT, message, needs_log=not silent_host, host_lost=far))

    def heard_garbage(self, role: str, rank: int, error: ChannelError) -> None:
        """Take in that a rank sent what is no message."""
        self._blame.add(Evidence(role, rank, Cause.RAISED, error.message))

    def heard_dump(self, place: Place) -> None:
        """Note that a rank has written its stacks."""
        self._dumped.add(place)

    def assess(self, evidence: Evidence, grace_s: float = 0.0, blame_s: float = 0.0, *, unbuilt: bool = False) -> None:
        """Judge a failure: a restart mends it, or the run continues without the rank, which counts after `grace_s`; or
        it ends the run, after `blame_s` where a better cause may come. `unbuilt`: the rank could not be built."""
        if not self._states.fail(evidence, grace_s, unbuilt=unbuilt):
            self._blame.add(evidence, blame_s or grace_s or ROOT_CAUSE_GRACE_S)

    # ── what is looked for at every tick ──────────────────────────────────────────────────────────

    def check(self) -> None:
        """Look at processes, failures, deadlines and progress, now and then, and at once where something has failed.
        Raise RoleFailure when the cause is known."""
        now = time.monotonic()
        if now - self._checked_at < _LOOK_S and not (self._blame.pending or self._states.is_failing):
            return
        self._checked_at = now
        self._check_processes()
        self._settle_failures()
        if not self._blame.pending:
            self._check_deadlines()
        self._check_progress()
        if not self._states.is_failing and (cause := self._blame.root_cause()):
            raise self.failure(cause)

    def _check_processes(self) -> None:
        for started in [*self._membership.launcher.started]:
            code = started.process.poll()
            if code is not None and started.mark not in self._ended:
                self._ended.add(started.mark)
                self.assess(from_end(started, code), _EXIT_GRACE_S)
            elif started.is_part and started.mark not in self._ended and (silence := self._silence_of(started)):
                self._ended.add(started.mark)
                self.assess(Evidence(started.role, started.ranks[0], Cause.SILENT, silence, needs_log=False))

    def _silence_of(self, started: Started) -> str:
        """Return how long the host of a part, which has no heartbeat of its own, has been silent; empty: not too
        long."""
        assert isinstance(started.process, RemoteProcess)
        seconds = started.process.node.silent_s
        if seconds <= self._membership.hub.heartbeat_timeout_s:
            return ""
        return f"no sign of life from its part on {started.host} for {seconds:.1f} s: it is down, or its network is"

    def _settle_failures(self) -> None:
        failed = self._states.newly_failed()
        for evidence in failed:
            self._membership.remove(evidence)
            self._blame.forget_secondary(evidence.role, evidence.rank)
            self._watch.moved()
            self._groups[evidence.role].fail(evidence.rank)
            if evidence.role in _IN_A_SYNC and evidence.rank in self._states.dropped(evidence.role):
                self._dropped_at = time.monotonic()
            self._states.policy_of(evidence.role).on_failure(evidence)
        calls = [(group, call) for group, call in self._flying() if group.role in _IN_A_SYNC]
        self._release_peers([pair for pair in calls if pair[1].verb in JOINED_VERBS], failed)
        explained = any(call.failed or call.sent_before(self._dropped_at) for _, call in calls)
        if explained or self._states.any_in(RankState.FAILED, roles=_IN_A_SYNC):
            for error in self._blame.take_explained():
                self._groups[error.role].fail(error.rank, error.in_sync)

    def _release_peers(self, joined: Sequence[tuple[Group, Call]], failed: Sequence[Evidence]) -> None:
        """Release ranks that would wait for a failed one: a connection to a host whose network is down does not end."""
        if any(evidence.role in _IN_A_SYNC for evidence in failed) or any(call.failed for _, call in joined):
            for group, call in joined:
                for rank in () if call.released else call.missing:
                    self._membership.hub.send(group.role, rank, Message(Kind.PEER_LOST, call=call.number).frames())
                call.released = True

    def _check_deadlines(self) -> None:
        for group, call in self._flying():
            if call.overdue and not self._leave_out_unbuilt(group, call):
                late = [(group.role, rank) for rank in call.missing]
                missing = {place: pending for place, pending in self.waiting().items() if place in late}
                self.overdue = True
                stall = self._watch.chain(missing)
                self._dump(missing)
                message = f"no answer within {call.timeout_s:g} s: {stall.chain}"
                self._blame.add(Evidence(*stall.culprits[0], Cause.OVERDUE, message))

    def _leave_out_unbuilt(self, group: Group, call: Call) -> bool:
        """Go on without the ranks that were not built in time; return whether that is allowed."""
        message, hint = f"was not built within {call.timeout_s:g} s", "raise run.start_timeout_s"
        return call.verb is Verb.BUILD and all(
            self._states.fail(Evidence(group.role, rank, Cause.OVERDUE, message, hint=hint), unbuilt=True)
            for rank in call.missing
        )

    def _check_progress(self) -> None:
        now = time.monotonic()
        if now - self._progress_at < _TICK_S or self._blame.pending or self._states.any_in(RankState.FAILING):
            return
        self._progress_at = now  # with hundreds of ranks not at every answer
        waiting = self.waiting()
        if stall := self._watch.look(waiting, coming=self._states.any_in(*_COMING)):
            if not stall.culprits:
                raise RuntimeError(f"the driver waits, and no call was in flight for {self._watch.timeout_s:g} s")
            self._dump(waiting)
            message = f"nothing has moved for {self._watch.timeout_s:g} s (run.stall_timeout_s): {stall.chain}"
            for role, rank in self._to_blame(stall):
                self.assess(Evidence(role, rank, Cause.STALLED, message))
            self.overdue = self._blame.pending

    def _to_blame(self, stall: Stall) -> Sequence[Place]:
        """Return those that can be started again, where all wait for each other, else those that others wait for."""
        restartable = [place for place in stall.culprits if self._states.may_restart(place)]
        return restartable if restartable and stall.is_circle else stall.culprits

    def _flying(self) -> list[tuple[Group, Call]]:
        return [(group, call) for group in self._groups.values() for call in group.in_flight]

    def waiting(self) -> dict[Place, Call]:
        """Return the ranks with a pending reply, each with the last call that it has not answered."""
        return {(group.role, rank): call for group, call in self._flying() for rank in call.missing}

    def _grace_s(self, roles: Sequence[str]) -> float:
        """Return how long a rank's error waits for the end of another rank of these roles."""
        plans = [self._membership.plan.role(role) for role in roles]
        direct = all(plan.launcher == "python" and plan.nodes_of_rank == 1 for plan in plans)
        return ROOT_CAUSE_GRACE_S if direct else LAUNCHER_GRACE_S

    # ── stacks, and what the person reads ─────────────────────────────────────────────────────────

    def _dump(self, places: Iterable[Place]) -> None:
        """Have ranks write their stacks into their logs, from a thread that answers though the main one does not."""
        wanted = {place for place in places if place in self._membership.members}
        self._dumped.clear()
        for role, rank in wanted:
            self._membership.hub.send(role, rank, Message(Kind.DUMP).frames())
        deadline = time.monotonic() + _DUMP_S
        while not self._dumped >= wanted and time.monotonic() < deadline:
            self._pump(_TICK_S)
        for place in wanted - self._dumped:
            self._signal_for_stacks(place)

    def _signal_for_stacks(self, place: Place) -> None:
        """Do the same for a rank whose threads do not run: one in native code that holds the interpreter's lock."""
        member = self._membership.members.get(place)
        if member is None or member.host != socket.gethostname():
            return
        log_path = self._membership.launcher.log_path(*place)
        deadline = time.monotonic() + _STACKS_S
        with suppress(OSError, psutil.Error):
            before = size = log_path.stat().st_size
            os.kill(member.pid, signal.SIGUSR1)
            while psutil.Process(member.pid).status() not in _MUTE and time.monotonic() < deadline:
                time.sleep(_WRITTEN_S)
                written, size = size, log_path.stat().st_size
                if before < written == size:
                    return

    def failure(self, evidence: Evidence) -> RoleFailure:
        """Return the error that ends the run; forget the call that it ends."""
        role, rank = evidence.role, evidence.rank
        group = self._groups[role]
        call = next((call for call in group.in_flight if rank in call.missing), next(iter(group.in_flight), None))
        joined = (role, rank) in self._membership.members
        verb = str(call.verb) if call else "" if joined else "start"
        steps = [call.step for other in self._groups.values() for call in other.in_flight[:1]]
        step = call.step if call else next((step for step in steps if step is not None), None)
        if call is not None and not evidence.permanent:
            group.drop(call)
        log_path = self._membership.launcher.log_path(role, rank)
        if evidence.log_name:
            log_path = log_path.with_name(evidence.log_name)
        return RoleFailure(
            role,
            rank,
            host=self._membership.host_of(role, rank),
            verb=verb,
            step=step,
            cause=evidence.message + self._states.remark(role),
            log_path=str(log_path),
            log_tail=tail(log_path) if evidence.needs_log else "",
            dumps=sorted(str(path) for path in log_path.parent.glob(f"{FLIGHT_RECORDER}*")),
            remote_kind=evidence.kind,
            remote_hint=evidence.hint,
        )
