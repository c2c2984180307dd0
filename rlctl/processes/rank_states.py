"""The state of every rank that was started, in one table with one owner: who is lost, who may be started again, and how
often still.

A rank is lost when its process ended, when it gave no sign of life, when it says that its engine died, or when it makes
no progress (`stall_watch.py`). Where the restart policy allows it, it is started again; otherwise the run ends. What
would only repeat (an error that a verb raised, a missed deadline) changes no rank's state: it ends the run as with any
role. Where the run may go on with fewer (`least`), a rank that never took part is left out for any of these, and one
that is only late is taken in when it comes.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from rlctl.processes.failures import Evidence
from specs.errors import Cause

Place = tuple[str, int]  # role, rank


class RankState(StrEnum):
    STARTING = "starting"  # launched, not heard of yet
    RUNNING = "running"
    LEAVING = "leaving"  # it ended or hangs, but what it sent before may still be on its way
    LATE = "late"  # it did not come or was not built in time: the run goes on without it, and it may still come
    TAKEN_IN = "taken in"  # it has come late, and is not yet built as the others are
    LOST = "lost"  # nothing more comes from it; it can be started again
    RESTARTING = "restarting"  # started again, and not yet built as it was
    DROPPED = "dropped"  # lost for good, and the run goes on without it
    GONE = "gone"  # it ended or hangs, and is not started again: the run ends


TRANSITIONS: Mapping[RankState, frozenset[RankState]] = {
    RankState.STARTING: frozenset({RankState.RUNNING, RankState.LATE, RankState.LEAVING, RankState.GONE}),
    # LATE: not built in time.
    RankState.RUNNING: frozenset({RankState.LATE, RankState.LEAVING, RankState.GONE}),
    RankState.LATE: frozenset({RankState.TAKEN_IN, RankState.LEAVING}),
    # LATE: somebody broke it off.
    RankState.TAKEN_IN: frozenset({RankState.RUNNING, RankState.LATE, RankState.LEAVING}),
    RankState.LEAVING: frozenset({RankState.LOST, RankState.DROPPED}),
    RankState.DROPPED: frozenset(),
    RankState.LOST: frozenset({RankState.RESTARTING}),
    # LEAVING: lost once more. LOST: somebody broke the restart off (Ctrl-C), and it does not count.
    RankState.RESTARTING: frozenset(
        {RankState.RUNNING, RankState.LATE, RankState.LEAVING, RankState.LOST, RankState.GONE}
    ),
    RankState.GONE: frozenset(),
}


_NEVER_CAME = (RankState.LATE, RankState.TAKEN_IN)


@dataclass(frozen=True)
class RestartPolicy:
    """Ranks of `role` are started again, at most `limit` times in all; `on_loss` hears of each loss, and of each rank
    that is late. Role "": none. `ranks`: only these; None: all.

    As long as `least` are left (None: never), a rank is dropped where no restart is left, where it cannot be built, or
    where it is one of those on other hosts (`far`) and gives no sign of life: its host may be gone."""

    role: str = ""
    limit: int = 0
    on_loss: Callable[[Evidence], None] = lambda evidence: None
    least: int | None = None
    far: frozenset[int] = frozenset()
    ranks: frozenset[int] | None = None

    def covers(self, place: Place) -> bool:
        return place[0] == self.role and (self.ranks is None or place[1] in self.ranks)


_NO_POLICY = RestartPolicy()


class RankStates:
    """Owner of the table. Others ask, and report what they saw; only this class changes a state."""

    def __init__(self) -> None:
        self.restarts: Counter[str] = Counter()  # by role: begun so far and not broken off
        self._policies: dict[str, RestartPolicy] = {}
        self._states: dict[Place, RankState] = {}
        self._leaving: dict[Place, tuple[Evidence, float]] = {}  # why, and until when messages may still arrive
        self._to_drop: set[Place] = set()  # of those that leave or have left

    def __getitem__(self, place: Place) -> RankState:
        """Raises KeyError for a rank that was never started."""
        return self._states[place]

    def lost(self, role: str) -> list[int]:
        """Ranks of a role that nobody needs to wait for, and that can be started again."""
        return self._ranks(role, RankState.LOST)

    def dropped(self, role: str) -> list[int]:
        """Ranks of a role that the run goes on without."""
        return self._ranks(role, RankState.DROPPED)

    def late(self, role: str) -> list[int]:
        """Ranks of a role that the run goes on without until they come."""
        return self._ranks(role, RankState.LATE)

    def absent(self, role: str) -> list[int]:
        """Ranks of a role that take no part: dropped, late, or not yet taken in."""
        return sorted(self.dropped(role) + self.late(role) + self._ranks(role, RankState.TAKEN_IN))

    def running(self, role: str) -> list[int]:
        """Ranks of a role that can be asked now."""
        return self._ranks(role, RankState.RUNNING)

    def any_in(self, *states: RankState, roles: Container[str] | None = None) -> bool:
        """Whether a rank, of these roles (None: of all), is in one of these states."""
        found = (role for (role, _), state in self._states.items() if state in states)
        return any(roles is None or role in roles for role in found)

    def restarts_used(self, role: str) -> int:
        """Restarts of a role so far, and those that are due."""
        going = (RankState.LEAVING, RankState.LOST)
        leaving = {place for place, state in self._states.items() if place[0] == role and state in going}
        return self.restarts[role] + len(leaving - self._to_drop)

    def policy_of(self, role: str) -> RestartPolicy:
        """What becomes of ranks of a role that are lost."""
        return self._policies.get(role, _NO_POLICY)

    def allow_restarts(self, policy: RestartPolicy) -> None:
        """From now on the loss of a rank of the policy's role does not end the run."""
        self._policies[policy.role] = policy

    def started(self, role: str, processes: int) -> None:
        """All ranks of a role were launched."""
        for rank in range(processes):
            assert (role, rank) not in self._states, f"{role} rank {rank} was started before"
            self._states[role, rank] = RankState.STARTING

    def joined(self, place: Place) -> None:
        """A rank has proven itself. One that is started again is back only when it is built; of one that ended since
        this was on its way."""
        if self._states[place] is RankState.STARTING:
            self._move(place, RankState.RUNNING)

    def failed(self, evidence: Evidence, grace_s: float = 0.0, *, unbuilt: bool = False) -> bool:
        """Note a failure; `unbuilt`: the rank could not be built. True: it is the loss of a rank that may be started
        again or left out, and the run goes on. It counts as lost only after `grace_s`: what it sent before may still be
        on its way."""
        place = evidence.role, evidence.rank
        is_loss = evidence.permanent or evidence.cause in (Cause.ENGINE_DIED, Cause.STALLED)
        if not (is_loss or unbuilt):
            return False
        state = self._states[place]
        if state in (RankState.LEAVING, RankState.LOST, RankState.DROPPED):
            return True  # more signs of the same loss
        silent = evidence.cause is Cause.SILENT and evidence.rank in self.policy_of(evidence.role).far
        drop = self._may_drop(place) and (silent or unbuilt or not self.may_restart(place))
        if drop:
            self._to_drop.add(place)
        if drop or (is_loss and self.may_restart(place)):
            self._move(place, RankState.LEAVING)
            self._leaving[place] = evidence, time.monotonic() + grace_s
            return True
        if evidence.permanent and state is not RankState.GONE:
            self._move(place, RankState.GONE)
        return False

    def let_be_late(self, place: Place) -> bool:
        """Go on without a rank that is not there in time, where that is allowed. True: it is late."""
        if not self._may_drop(place):
            return False
        self._move(place, RankState.LATE)
        return True

    def begin_taking_in(self, role: str, ranks: Sequence[int]) -> None:
        """These late ranks have come and are about to be built."""
        for rank in ranks:
            self._move((role, rank), RankState.TAKEN_IN)

    def end_taking_in(self, role: str, ranks: Sequence[int], *, finished: bool) -> None:
        """Those of `ranks` that were not lost meanwhile take part; or, when not `finished`, are late as before."""
        for rank in self._ranks(role, RankState.TAKEN_IN):
            if rank in ranks:
                self._move((role, rank), RankState.RUNNING if finished else RankState.LATE)

    def newly_lost(self) -> list[Evidence]:
        """Losses whose grace is over, each once."""
        now = time.monotonic()
        due = {place: evidence for place, (evidence, until) in self._leaving.items() if now >= until}
        for place in due:
            del self._leaving[place]
            self._move(place, RankState.DROPPED if place in self._to_drop else RankState.LOST)
        return list(due.values())

    def begin_restart(self, role: str) -> list[int]:
        """The lost ranks of a role are about to be started again; each is a restart."""
        ranks = self.lost(role)
        for rank in ranks:
            self._move((role, rank), RankState.RESTARTING)
        self.restarts[role] += len(ranks)
        return ranks

    def end_restart(self, role: str, ranks: Sequence[int], *, finished: bool) -> None:
        """Those of `ranks` that were not lost again are back; or, when not `finished`, as if never started again."""
        restarting = [rank for rank in self._ranks(role, RankState.RESTARTING) if rank in ranks]
        for rank in restarting:
            self._move((role, rank), RankState.RUNNING if finished else RankState.LOST)
        if not finished:
            self.restarts[role] -= len(restarting)

    def remark(self, role: str) -> str:
        """What a failure of `role` should say about earlier restarts."""
        policy, restarts = self.policy_of(role), self.restarts[role]
        if not policy.role or not restarts:
            return ""
        times = "once" if restarts == 1 else f"{restarts} times"
        return f" ({role} ranks were started again {times} before; {role}.max_restarts = {policy.limit})"

    def may_restart(self, place: Place) -> bool:
        """Whether the loss of this rank would be made good."""
        policy = self.policy_of(place[0])
        allowed = policy.covers(place) and self.restarts_used(place[0]) < policy.limit
        return allowed and self._states[place] in (RankState.RUNNING, RankState.RESTARTING)

    def _may_drop(self, place: Place) -> bool:
        policy, role, state = self.policy_of(place[0]), place[0], self._states[place]
        least = policy.least
        if state in _NEVER_CAME:
            return True  # the others are enough already
        if not policy.covers(place) or least is None or state in (RankState.LEAVING, RankState.LOST, RankState.GONE):
            return False
        taking_part = {one for one, now in self._states.items() if one[0] == role and now not in _NEVER_CAME}
        return len(taking_part - self._to_drop - {place}) >= least

    def _ranks(self, role: str, state: RankState) -> list[int]:
        return sorted(rank for (name, rank), now in self._states.items() if name == role and now is state)

    def _move(self, place: Place, state: RankState) -> None:
        before = self._states[place]
        assert state in TRANSITIONS[before], f"{place[0]} rank {place[1]} cannot go from {before} to {state}"
        self._states[place] = state
