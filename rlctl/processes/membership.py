"""Keep who is there: the processes of the ranks, how each introduced itself, and the hosts they are on."""

from __future__ import annotations

from rlctl.processes.channel import Hub, Member
from rlctl.processes.failures import Evidence
from rlctl.processes.launch import Launcher, Place
from rlctl.processes.placement import Plan, RolePlan
from rlctl.processes.rank_states import RankState, RankStates
from specs.errors import Cause
from specs.wire.messages import Kind, Message, Verb

_CLOSE_S = 10.0  # for ranks to end by themselves


class Membership:
    """The ranks of a run. `states` says of each whether it takes part, and is the only place that does."""

    def __init__(self, plan: Plan, hub: Hub, launcher: Launcher) -> None:
        self.plan, self.hub, self.launcher = plan, hub, launcher
        self.members: dict[Place, Member] = {}
        self.states = RankStates()  # no restarts unless allowed (rlctl/loop/recovery.py)

    def launch(self, plan: RolePlan) -> list[Evidence]:
        """Start a role's processes. Return which ranks wait for a host that is not there yet."""
        self.hub.expect(plan.role, plan.processes)
        pending = self.plan.cluster.pending if self.plan.cluster is not None else {}
        self.launcher.start(plan)
        self.states.started(plan.role, plan.processes)
        return [
            Evidence(plan.role, rank, Cause.OVERDUE, pending[hosts[0]], needs_log=False)
            for rank in range(plan.processes)
            if (hosts := [node.host for node in plan.remotes_of(rank) if node.host in pending])
        ]

    def relaunch(self, role: str, rank: int) -> None:
        """Start a failed rank again, in the place of what is left of it."""
        self.launcher.kill(role, rank)  # there is one where a restart was broken off
        self.members.pop((role, rank), None)
        self.launcher.start_again(self.plan.role(role), rank, self.hub.forget(role, rank))

    def join(self, member: Member) -> None:
        """Note that a rank has introduced itself."""
        place = member.role, member.rank
        self.members[place] = member
        self.states.joined(place)

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
        """End what is left of a rank that has failed. One whose host is lost starts again on the next that comes."""
        role, rank = evidence.role, evidence.rank
        # A host that gives no sign of life is not waited for: with several roles there that would add up.
        self.launcher.kill(role, rank, wait=not self.silent_with(role, rank))
        if rank not in self.states.dropped(role):
            return
        if evidence.host_lost and self.plan.cluster is not None and self.plan.cluster.replaces:
            self.states.await_host((role, rank))
            self.relaunch(role, rank)
        else:
            self.hub.expect_no_more(role, rank)

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

    def close(self, *, polite: bool) -> None:
        """End every process. `polite`: ask with the verb `close` first."""
        if polite:
            for late in [(plan.role, rank) for plan in self.plan.roles for rank in self.states.late(plan.role)]:
                self.launcher.kill(*late, wait=False)  # it may hear nothing yet
            for role, rank in self.members:
                self.hub.send(role, rank, Message(Kind.CALL, verb=Verb.CLOSE).frames())
            self.launcher.wait(_CLOSE_S)
        self.launcher.stop()
        self.hub.close()
