"""Keep who is there: the processes of the ranks, what each said when it joined, and the hosts that may still join."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping

from rlctl.processes.channel import Hub
from rlctl.processes.failures import Evidence
from rlctl.processes.handshake import Member
from rlctl.processes.joining_hosts import JoiningHosts
from rlctl.processes.launch import Launcher, Place
from rlctl.processes.launched_ranks import LaunchedRanks
from rlctl.processes.placement import Plan, RolePlan
from rlctl.processes.rank_states import RankState, RankStates
from specs.errors import Cause
from specs.wire.messages import Kind, Message, Verb


class Membership:
    """The ranks of a run. `states` says of each whether it takes part, and is the only place that does."""

    def __init__(self, plan: Plan, hub: Hub, launcher: Launcher, modules: Mapping[str, str]) -> None:
        self.plan, self.hub, self.launcher = plan, hub, launcher
        self.members: dict[Place, Member] = {}
        self.states = RankStates()  # no restarts unless allowed (rlctl/loop/recovery.py)
        self.launched = LaunchedRanks()
        self._modules = modules
        self._joining = JoiningHosts(plan.unreached, self._start_joining, self._report_joining)

    def launch(self, plan: RolePlan) -> list[Evidence]:
        """Start a role's processes. Return why ranks on hosts that cannot be reached do not start."""
        self.hub.expect(plan.role, plan.processes)
        unreached = self.plan.unreached
        absent = {rank: host for rank in range(plan.processes) if (host := plan.host_of(rank)) in unreached}
        self.launcher.start(plan, module=self._modules.get(plan.role, ""), without=absent)
        self.states.started(plan.role, plan.processes)
        for rank, host in absent.items():
            self._joining.await_rank(host, (plan.role, rank))
        return [
            Evidence(plan.role, rank, Cause.OVERDUE, f"is not there: {unreached[host].why}", needs_log=False)
            for rank, host in absent.items()
        ]

    def relaunch(self, role: str, rank: int) -> None:
        """Start a failed rank again, in the place of what is left of it."""
        self.launcher.kill(role, rank)  # there is one where a restart was broken off
        self.members.pop((role, rank), None)
        self.hub.forget(role, rank)
        remark = f"{role} rank {rank} is started again"
        self.launcher.start_again(self.plan.role(role), rank, module=self._modules.get(role, ""), remark=remark)

    def join(self, member: Member) -> None:
        """Note that a rank has introduced itself."""
        place = member.role, member.rank
        self.members[place] = member
        self.states.joined(place)
        self._joining.joined(place)
        for started in self.launcher.started:
            below = started.is_launcher and member.role == started.role and member.rank in started.ranks
            if below and isinstance(started.process, subprocess.Popen):
                self.launched.watch(place, member.pid, started.process.pid)

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

    def give_up_joining(self, evidence: Evidence) -> bool:
        """Take the end of a rank on a host that may still join for another failed attempt; return whether it is one."""
        place = evidence.role, evidence.rank
        joining = self._joining.ended(place, f"did not come: {evidence.message}")
        if joining:
            self.launcher.give_up(*place)
        return joining

    def look_for_hosts(self) -> None:
        """Go on with the hosts that may still join."""
        self._joining.look()

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
        self._joining.close()
        if polite:
            for late in [(plan.role, rank) for plan in self.plan.roles for rank in self.states.late(plan.role)]:
                self.launcher.give_up(*late)  # it may hear nothing yet
            for role, rank in self.members:
                self.hub.send(role, rank, Message(Kind.CALL, verb=Verb.CLOSE).frames())
            self.launcher.wait(grace_s)
        self.launcher.stop()
        self.hub.close()

    def _start_joining(self, place: Place) -> None:
        role, rank = place
        self.launcher.seek(self.plan.role(role), rank, module=self._modules.get(role, ""))

    def _report_joining(self, place: Place, why: str) -> None:
        started = self.launcher.log_path(*place).exists()
        self.states.policy_of(place[0]).on_failure(Evidence(*place, Cause.OVERDUE, why, needs_log=started))
