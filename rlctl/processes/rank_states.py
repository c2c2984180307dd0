"""The state of every rank that was started, in one table with one owner: which have failed, which may be started again,
and how often still.

A rank fails when its process ended, when it gave no sign of life, when its engine died, or when it makes no progress
(`stall_watch.py`). Where the restart policy allows it, it is started again; otherwise the run ends. What would only
repeat (an error that a verb raised, a missed deadline) changes no rank's state: it ends the run as with any role. Where
the run may continue with fewer (`least`), a rank that never took part is left out for any of these, and one that is
only late joins when it comes; so does one whose node is lost, where the cluster may provide another.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum

from rlctl.processes.failures import Evidence
from rlctl.processes.launch import Place
from specs.errors import Cause


class RankState(StrEnum):
    STARTING = "starting"  # launched, not heard of yet
    RUNNING = "running"
    FAILING = "failing"  # it ended or hangs, but what it sent before may still be on its way
    LATE = "late"  # it did not come in time: the run continues without it, and it may still come
    JOINING = "joining"  # it has come late, and is not yet built as the others are
    FAILED = "failed"  # nothing more comes from it; it can be started again
    RESTARTING = "restarting"  # started again, and not yet built as it was
    DROPPED = "dropped"  # it failed for good, and the run continues without it
    FATAL = "fatal"  # it ended or hangs, and is not started again: the run ends


_NEVER_CAME = (RankState.LATE, RankState.JOINING)


@dataclass(frozen=True)
class RestartPolicy:
    """Ranks of `role` are started again, at most `limit` times in all; `on_failure` hears of each failure, and of each
    rank that is late. Role "": none.

    As long as `least` are left (None: never), a rank is dropped where no restart is left, where it cannot be built, or
    where its host is lost."""

    role: str = ""
    limit: int = 0
    on_failure: Callable[[Evidence], None] = lambda evidence: None
    least: int | None = None


_NO_POLICY = RestartPolicy()


class RankStates:
    """Own the table. Others report what they saw; only this class changes a state."""

    def __init__(self) -> None:
        self.restarts: Counter[str] = Counter()  # by role: begun so far and not broken off
        self._policies: dict[str, RestartPolicy] = {}
        self._states: dict[Place, RankState] = {}
        self._failing: dict[Place, tuple[Evidence, float]] = {}  # why, and until when messages may still arrive
        self._to_drop: set[Place] = set()  # of those that leave or have left
        self._starting: set[Place] = set()  # again, and not to be built yet

    def __getitem__(self, place: Place) -> RankState:
        """Return a rank's state. Raise KeyError for one that was never started."""
        return self._states[place]

    def failed(self, role: str) -> list[int]:
        """Return the ranks of a role that no reply is expected from, and that can be started again."""
        return self._ranks(role, RankState.FAILED)

    def dropped(self, role: str) -> list[int]:
        """Return the ranks of a role that the run continues without."""
        return self._ranks(role, RankState.DROPPED)

    def late(self, role: str) -> list[int]:
        """Return the ranks of a role that the run continues without until they come."""
        return self._ranks(role, RankState.LATE)

    def absent(self, role: str) -> list[int]:
        """Return the ranks of a role that take no part: dropped, late, or not yet joined."""
        return self._ranks(role, RankState.DROPPED, RankState.LATE, RankState.JOINING)

    def unreachable(self, role: str) -> list[int]:
        """Return the ranks of a role that no call is sent to: they have failed, or are not there, or not yet again."""
        begun = [rank for of, rank in self._starting if of == role]
        return [*self._ranks(role, RankState.FAILED, RankState.DROPPED, RankState.LATE), *begun]

    @property
    def is_failing(self) -> bool:
        """Return whether a failure waits for what its rank sent before."""
        return bool(self._failing)

    def running(self, role: str) -> list[int]:
        """Return the ranks of a role that can be called now."""
        return self._ranks(role, RankState.RUNNING)

    def any_in(self, *states: RankState, roles: Container[str] | None = None) -> bool:
        """Return whether a rank, of these roles (None: of all), is in one of these states."""
        found = (role for (role, _), state in self._states.items() if state in states)
        return any(roles is None or role in roles for role in found)

    def restarts_used(self, role: str) -> int:
        """Count the restarts of a role so far, and those that are due."""
        due = (RankState.FAILING, RankState.FAILED)
        failing = {place for place, state in self._states.items() if place[0] == role and state in due}
        return self.restarts[role] + len(failing - self._to_drop)

    def policy_of(self, role: str) -> RestartPolicy:
        """Return what becomes of ranks of a role that fail."""
        return self._policies.get(role, _NO_POLICY)

    def allow_restarts(self, policy: RestartPolicy) -> None:
        """Let the run continue from now on when a rank of the policy's role fails."""
        self._policies[policy.role] = policy

    def started(self, role: str, processes: int) -> None:
        """Note that all ranks of a role were launched."""
        for rank in range(processes):
            assert (role, rank) not in self._states, f"{role} rank {rank} was started before"
            self._states[role, rank] = RankState.STARTING

    def joined(self, place: Place) -> None:
        """Note that a rank has introduced itself. One that is started again is back only when it is built; one may also
        have ended since it did."""
        if self._states[place] is RankState.STARTING:
            self._states[place] = RankState.RUNNING

    def fail(self, evidence: Evidence, grace_s: float = 0.0, *, unbuilt: bool = False) -> bool:
        """Note a failure; `unbuilt`: the rank could not be built. Return whether the run continues: the rank may be
        started again or left out. It counts as failed only after `grace_s`: what it sent before may still be on its
        way."""
        place = evidence.role, evidence.rank
        is_failure = evidence.permanent or evidence.cause in (Cause.ENGINE_DIED, Cause.STALLED)
        if not (is_failure or unbuilt):
            return False
        state = self._states[place]
        if state in (RankState.FAILING, RankState.FAILED, RankState.DROPPED):
            return True  # more signs of the same failure
        drop = self._may_drop(place) and (evidence.host_lost or unbuilt or not self.may_restart(place))
        if drop:
            self._to_drop.add(place)
        if drop or (is_failure and self.may_restart(place)):
            self._states[place] = RankState.FAILING
            self._failing[place] = evidence, time.monotonic() + grace_s
            return True
        if evidence.permanent and state is not RankState.FATAL:
            self._states[place] = RankState.FATAL
        return False

    def let_be_late(self, place: Place) -> bool:
        """Go on without a rank that is not there in time, where that is allowed; return whether it is."""
        if not self._may_drop(place):
            return False
        self._states[place] = RankState.LATE
        return True

    def await_host(self, place: Place) -> None:
        """Note that a rank that was dropped with its host comes again, once there is another."""
        self._to_drop.discard(place)
        self._states[place] = RankState.LATE

    def newly_failed(self) -> list[Evidence]:
        """Return the failures whose grace is over, each once."""
        if not self._failing:
            return []
        now = time.monotonic()
        due = {place: evidence for place, (evidence, until) in self._failing.items() if now >= until}
        for place in due:
            del self._failing[place]
            self._states[place] = RankState.DROPPED if place in self._to_drop else RankState.FAILED
        return list(due.values())

    @contextmanager
    def starting(self, role: str, ranks: Sequence[int]) -> Iterator[None]:
        """Send these ranks nothing in the block, which starts them: it would be lost, or come before their build."""
        places = {(role, rank) for rank in ranks}
        self._starting |= places
        try:
            yield
        finally:
            self._starting -= places

    @contextmanager
    def building(self, role: str, ranks: Sequence[int], state: RankState) -> Iterator[None]:
        """Keep ranks in this state, RESTARTING (which counts as a restart of each) or JOINING, while the block builds
        them. At its end those run that did not fail meanwhile; when it raises they are as before."""
        after = {rank: self._states[role, rank] for rank in ranks}  # where the block raises
        self._states |= {(role, rank): state for rank in ranks}
        self.restarts[role] += len(ranks) * (state is RankState.RESTARTING)
        try:
            yield
            after = dict.fromkeys(ranks, RankState.RUNNING)
        finally:
            for rank in [rank for rank in ranks if self._states[role, rank] is state]:
                self._states[role, rank] = after[rank]
                self.restarts[role] -= after[rank] is RankState.FAILED

    def remark(self, role: str) -> str:
        """Return what a failure of `role` should say about earlier restarts."""
        policy, restarts = self.policy_of(role), self.restarts[role]
        if not policy.role or not restarts:
            return ""
        times = "once" if restarts == 1 else f"{restarts} times"
        return f" ({role} ranks were started again {times} before; {role}.max_restarts = {policy.limit})"

    def may_restart(self, place: Place) -> bool:
        """Return whether this rank would be started again if it failed."""
        allowed = self.restarts_used(place[0]) < self.policy_of(place[0]).limit
        return allowed and self._states[place] in (RankState.RUNNING, RankState.RESTARTING)

    def _may_drop(self, place: Place) -> bool:
        role, state = place[0], self._states[place]
        least = self.policy_of(role).least
        if state in _NEVER_CAME:
            return True  # the others are enough already
        if least is None or state in (RankState.FAILING, RankState.FAILED, RankState.FATAL):
            return False
        taking_part = {one for one, now in self._states.items() if one[0] == role and now not in _NEVER_CAME}
        return len(taking_part - self._to_drop - {place}) >= least

    def _ranks(self, role: str, *states: RankState) -> list[int]:
        return sorted([rank for (name, rank), now in self._states.items() if name == role and now in states])
