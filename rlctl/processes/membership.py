"""Keep who is there: the processes of the ranks, how each introduced itself, and the hosts that may still join."""

from __future__ import annotations

import math
import time

from rlctl.processes.channel import Hub, Member
from rlctl.processes.failures import Evidence
from rlctl.processes.launch import Launcher, Place, Started
from rlctl.processes.node_connection import RemoteProcess
from rlctl.processes.placement import Plan, RolePlan
from rlctl.processes.rank_states import RankState, RankStates
from specs.errors import Cause
from specs.wire.messages import Kind, Message, Verb

LOOK_S = 10.0  # between two looks for a host


class Membership:
    """The ranks of a run. `states` says of each whether it takes part, and is the only place that does."""

    def __init__(self, plan: Plan, hub: Hub, launcher: Launcher) -> None:
        self.plan, self.hub, self.launcher = plan, hub, launcher
        self.members: dict[Place, Member] = {}
        self.states = RankStates()  # no restarts unless allowed (rlctl/loop/recovery.py)
        self._sought: dict[Place, float] = {}  # ranks on hosts that the run has begun without → when to look for them
        self._reported: dict[Place, str] = {}  # why one of them does not come

    def launch(self, plan: RolePlan) -> list[Evidence]:
        """Start a role's processes. Return why ranks on hosts that cannot be reached do not start."""
        self.hub.expect(plan.role, plan.processes)
        unreached = self.plan.unreached
        absent = {rank: host for rank in range(plan.processes) if (host := plan.host_of(rank)) in unreached}
        self.launcher.start(plan)
        self.states.started(plan.role, plan.processes)
        self._sought |= {(plan.role, rank): time.monotonic() + LOOK_S for rank in absent}
        return [
            Evidence(plan.role, rank, Cause.OVERDUE, f"is not there: {unreached[host]}", needs_log=False)
            for rank, host in absent.items()
        ]

    def relaunch(self, role: str, rank: int) -> None:
        """Start a failed rank again, in the place of what is left of it."""
        self.launcher.kill(role, rank)  # there is one where a restart was broken off
        self.members.pop((role, rank), None)
        self.hub.forget(role, rank)
        self.launcher.start_again(self.plan.role(role), rank, f"{role} rank {rank} is started again")

    def join(self, member: Member) -> None:
        """Note that a rank has introduced itself."""
        place = member.role, member.rank
        self.members[place] = member
        self.states.joined(place)
        self._sought.pop(place, None)

    def is_awaited(self, place: Place) -> bool:
        """Return whether a rank that was started is still to join."""
        absent = (RankState.FAILED, RankState.DROPPED, RankState.LATE)
        return place not in self.members and self.states[place] not in absent

    def let_be_late(self, evidence: Evidence) -> bool:
        """Go on without a rank until it comes, where that is allowed; return whether it is."""
        late = self.states.let_be_late((evidence.role, evidence.rank))
        if late:
            self.states.policy_of(evidence.role).on_failure(evidence)
        return late

    def remove(self, evidence: Evidence) -> None:
        """End what is left of a rank that has failed."""
        role, rank = evidence.role, evidence.rank
        # A host that gives no sign of life is not waited for: with several roles there that would add up.
        self.launcher.kill(role, rank, wait=not self.silent_with(role, rank))
        if rank in self.states.dropped(role):
            self.hub.expect_no_more(role, rank)

    def seek_again(self, started: Started, evidence: Evidence) -> bool:
        """Return whether a process that ended was a rank on a host that the run has begun without: it is sought again
        later. Report why it did not come, once for each reason, where there is a way to its host."""
        place, process = (evidence.role, evidence.rank), started.process
        if place not in self._sought or not isinstance(process, RemoteProcess):
            return False
        self._sought[place] = time.monotonic() + LOOK_S
        self.launcher.kill(*place)
        refused = process.node.refused
        why = f"is there, but cannot take part: {refused}" if refused else f"did not come: {evidence.message}"
        if (process.node.ready or refused) and self._reported.get(place) != why:
            self._reported[place] = why
            has_log = self.launcher.log_path(*place).exists()
            self.states.policy_of(place[0]).on_failure(Evidence(*place, Cause.OVERDUE, why, needs_log=has_log))
        return True

    def look_for_hosts(self) -> None:
        """Start ranks on hosts that may be there by now: each host is checked first, as the others were."""
        for place in [place for place, due in self._sought.items() if time.monotonic() > due]:
            self._sought[place] = math.inf  # until it ends
            self.launcher.start_rank(self.plan.role(place[0]), place[1])

    def silent_with(self, role: str, rank: int) -> str:
        """Return the other host whose ranks are all silent, this one among them; empty where there is none."""
        host = self.host_of(role, rank)
        there = [place for place in self.members if self.host_of(*place) == host]
        return host if host and all(self.hub.is_silent(*place) for place in there) else ""

    def host_of(self, role: str, rank: int) -> str:
        """Return where a rank of a role on several hosts is; empty for a role on one."""
        plan, member = self.plan.role(role), self.members.get((role, rank))
        own = member.host if member else ""
        return (plan.host_of(rank) or own) if plan.nodes > 1 or plan.remote else ""

    def close(self, *, polite: bool, grace_s: float) -> None:
        """End every process. `polite`: ask with the verb `close` first."""
        if polite:
            for late in [(plan.role, rank) for plan in self.plan.roles for rank in self.states.late(plan.role)]:
                self.launcher.kill(*late, wait=False)  # it may hear nothing yet
            for role, rank in self.members:
                self.hub.send(role, rank, Message(Kind.CALL, verb=Verb.CLOSE).frames())
            self.launcher.wait(grace_s)
        self.launcher.stop()
        self.hub.close()
