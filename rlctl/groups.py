"""Roles as groups of ranks: the driver calls a verb on a group, and hears of any rank's failure wherever it waits."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from rlctl.admission import Member
from rlctl.channel import Event, Hub, Joined, Silent
from rlctl.failures import ECHO_GRACE_S, Evidence, Verdicts, from_end, from_error
from rlctl.group import Group
from rlctl.launch import Launcher, tail
from rlctl.losses import JOINED_VERBS, Losses, Place
from rlctl.plan import LOOPBACK, Plan
from specs.errors import ChannelError, RoleFailure
from specs.messages import Kind, Message, Verb, parse

__all__ = ["Group", "Groups"]

_TICK_S = 0.1
_EXIT_GRACE_S = 0.5  # a rank that ends by itself has perhaps said why: let that message arrive
_STACKS_S = 0.3  # time for a hung rank to write where it is into its log


class Groups:
    """The processes of a run, by role. As a context manager it ends them all.

    `on_tick` is called at least every 100 ms while waiting, and may raise (a person's Ctrl-C). `modules` names
    "module:function" for roles whose handlers are not `workers/<role>.py`. Use from the main thread.
    """

    def __init__(
        self,
        plan: Plan,
        log_dir: Path,
        *,
        start_timeout_s: float = 300.0,
        verb_timeout_s: float = 1800.0,
        heartbeat_timeout_s: float = 30.0,
        on_tick: Callable[[], None] | None = None,
        modules: Mapping[str, str] | None = None,
        hub: Hub | None = None,
    ) -> None:
        self.plan = plan
        far = bool(plan.address)
        self.hub = hub or Hub(heartbeat_timeout_s=heartbeat_timeout_s, host=plan.address or LOOPBACK, curve=far)
        self.verb_timeout_s = verb_timeout_s
        self.members: dict[tuple[str, int], Member] = {}
        self.busy: list[tuple[float, float]] = []  # when ranks were at work, in no order; whoever reads it clears it
        self.launcher = Launcher(log_dir, self.hub.environment())
        self._start_timeout_s = start_timeout_s
        self._on_tick = on_tick
        self._modules = dict(modules or {})
        self._groups: dict[str, Group] = {role.role: Group(role.role, role.processes, self) for role in plan.roles}
        self._verdicts = Verdicts()
        self.losses = Losses()  # none allowed; whoever can bring ranks back sets it (rlctl/revive.py)
        self._ended: set[str] = set()
        self._ticked_at = 0.0
        self._closed = False
        self._obedient = True  # no rank is dead, hung or late: asking all to leave is worth the wait

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

    def start(self, names: Sequence[str] | None = None) -> None:
        """Launch roles (unset: all) and wait until every rank has proven itself. Raises RoleFailure, verb "start"."""
        chosen = [plan for plan in self.plan.roles if names is None or plan.role in names]
        for plan in chosen:
            self.hub.expect(plan.role, plan.processes)
            self.launcher.start(plan, module=self._modules.get(plan.role, ""))
        self._wait_for([(plan.role, rank) for plan in chosen for rank in range(plan.processes)])

    def restart(self, role: str) -> list[int]:
        """Start the lost ranks of a role again and wait until they have proven themselves; those that are lost again
        meanwhile are not waited for. Verbs in line go to the other ranks first: a new process could not answer them.
        Returns the ranks. Raises RoleFailure as `start` does."""
        self._groups[role].settle()
        ranks = self.losses.begin_restart(role)
        for rank in ranks:
            self.launcher.kill(role, rank)  # there is one where a restart was broken off
            self.members.pop((role, rank), None)
            self.hub.forget(role, rank)
            remark = f"{role} rank {rank} is started again"
            self.launcher.start_again(self.plan.role(role), rank, module=self._modules.get(role, ""), remark=remark)
        self._wait_for([(role, rank) for rank in ranks])
        return ranks

    def _wait_for(self, places: Sequence[Place]) -> None:
        deadline = time.monotonic() + self._start_timeout_s
        while absent := [place for place in places if place not in self.members and place not in self.losses.lost]:
            if time.monotonic() > deadline:
                cause = f"did not join within {self._start_timeout_s:g} s"
                raise self._failure(Evidence(*absent[0], cause), hint="raise run.start_timeout_s if it is only slow")
            self.tick()

    def tick(self, timeout_s: float = _TICK_S) -> None:
        """Wait up to `timeout_s` for something to happen and see to it. Raises RoleFailure."""
        event = self.hub.next(min(timeout_s, _TICK_S))
        while event is not None:
            self._see(event)
            event = self.hub.next(0)
        self._look_for_ends()
        self._look_for_losses()
        self._look_for_overdue()
        if root := self._verdicts.root():
            raise self._failure(root)
        if self._on_tick is not None and time.monotonic() - self._ticked_at >= _TICK_S / 2:
            self._ticked_at = time.monotonic()
            self._on_tick()

    def close(self, *, polite: bool = True, grace_s: float = 10.0) -> None:
        """End every process. `polite`: ask with the verb `close` first. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        if polite and self._obedient:
            for role, rank in self.members:
                self.hub.send(role, rank, Message(Kind.CALL, verb=Verb.CLOSE).frames())
            self.launcher.wait(grace_s)
        self.launcher.stop()
        self.hub.close()

    # ── what happens while waiting ────────────────────────────────────────────────────────────────

    def _see(self, event: Event) -> None:
        if isinstance(event, Joined):
            self.members[event.member.role, event.member.rank] = event.member
            return
        if isinstance(event, Silent):
            cause = f"no sign of life for {event.seconds:.1f} s: it hangs, or was stopped"
            self._judge(Evidence(event.role, event.rank, cause, permanent=True))
            return
        try:
            message = parse(event.frames)
        except ChannelError as error:
            self._verdicts.add(Evidence(event.role, event.rank, error.message))
            return
        if message.kind is Kind.ERROR:
            self._see_error(event.role, event.rank, message)
        else:
            self._groups[event.role].take(event.rank, message)

    def _see_error(self, role: str, rank: int, message: Message) -> None:
        group = self._groups[role]
        of_now = bool(group.line) and group.line[0].number == message.call
        if of_now or message.call == 0:  # 0: the role could not even be made; others: of a verb that has failed already
            joined = bool(self.losses.role) and message.verb in JOINED_VERBS
            alone = self.plan.role(role).world_size_of_group == 1 and not joined
            evidence = from_error(role, rank, message, alone=alone)
            if joined and evidence.is_echo:
                self.losses.hold(evidence, message.call)
            else:
                self._judge(evidence)

    def _look_for_ends(self) -> None:
        for started in self.launcher.started:
            code = started.process.poll()
            if code is not None and started.mark not in self._ended:
                self._ended.add(started.mark)
                self._judge(from_end(started, code), _EXIT_GRACE_S)

    def _judge(self, evidence: Evidence, grace_s: float = 0.0) -> None:
        """A loss that can be made good is noted, everything else ends the run."""
        if not self.losses.takes(evidence, grace_s):
            self._verdicts.add(evidence, grace_s or ECHO_GRACE_S)

    def _look_for_losses(self) -> None:
        for evidence in self.losses.newly_lost():
            self.launcher.kill(evidence.role, evidence.rank)
            self._groups[evidence.role].lose(evidence.rank)
            self.losses.on_loss(evidence)
        for evidence, call in self.losses.explained():
            self._groups[evidence.role].lose(evidence.rank, call)
        for evidence in self.losses.unexplained():
            self._verdicts.add(evidence)

    def _look_for_overdue(self) -> None:
        if self._verdicts.pending:
            return
        for group in self._groups.values():
            if group.line and group.line[0].overdue:
                call, rank = group.line[0], group.line[0].missing[0]
                self._obedient = False
                self._ask_for_stacks(group.role, rank)
                self._verdicts.add(Evidence(group.role, rank, f"no answer within {call.timeout_s:g} s"))

    def _ask_for_stacks(self, role: str, rank: int) -> None:
        for started in self.launcher.started:
            if started.role == role and not started.is_launcher and rank in started.ranks:
                started.process.send_signal(signal.SIGUSR1)
                time.sleep(_STACKS_S)

    def _failure(self, evidence: Evidence, hint: str = "") -> RoleFailure:
        role, rank = evidence.role, evidence.rank
        self._obedient &= not evidence.permanent
        group = self._groups[role]
        call = group.line[0] if group.line else None
        joined = (role, rank) in self.members
        verb = str(call.verb) if call else "none in flight" if joined else "start"
        steps = [other.line[0].step for other in self._groups.values() if other.line]
        step = call.step if call else next((step for step in steps if step is not None), None)
        if call is not None and not evidence.permanent:
            group.drop()
        log_path = self.launcher.log_path(role, rank)
        if evidence.log_name:
            log_path = log_path.with_name(evidence.log_name)
        return RoleFailure(
            role,
            rank,
            host=self._host_of(role, rank),
            verb=verb,
            step=step,
            cause=evidence.cause + self.losses.remark(role),
            log_path=str(log_path),
            log_tail="" if evidence.known else tail(log_path),
            remote_kind=evidence.kind,
            remote_hint=evidence.hint or hint,
        )

    def _host_of(self, role: str, rank: int) -> str:
        """Where a rank of a role on several hosts is; empty for a role on one."""
        plan, member = self.plan.role(role), self.members.get((role, rank))
        here = member.host if member else ""
        return (plan.host_of(rank) or here) if plan.nodes > 1 else ""
