"""No progress: every rank is alive, verbs are in flight, and nothing has moved for `run.stall_timeout_s`.

What moves: a verb that is sent, answered or answered in part, a rank that joins or is lost, a count in a heartbeat
(`specs/wire/heartbeat.py`): a token, a grade, a micro-batch, a weight. As long as anything moves anywhere, no rank is
stalled: slow is not stuck. Verbs that may be long without counting are judged by their deadlines alone.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from rlctl.processes.calls import Call
from rlctl.processes.launch import Place
from specs.wire.heartbeat import Activity, Moving

_MISSED_S = 5.0  # a driver that did not look for so long was stopped or busy: that time is no stall


@dataclass(frozen=True)
class Stall:
    """A chain of ranks that wait for each other. `culprits` are at its end: all others wait for them."""

    culprits: tuple[Place, ...]
    chain: str  # for people
    is_circle: bool  # all of them wait for each other


class StallWatch:
    """Notices everything that moves. Seconds are of the driver's monotonic clock; `waiting` has the ranks with a
    pending reply, each with the call."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._activities: dict[Place, Activity] = {}
        self._done: dict[str, int] = {}
        self._moved_at = self._looked_at = time.monotonic()

    def moved(self) -> None:
        """Note that something moved."""
        self._moved_at = time.monotonic()

    def heard(self, place: Place, activity: Activity) -> None:
        """Take in a heartbeat of a rank that serves a verb."""
        before = self._activities.get(place)
        self._activities[place] = activity
        known = before.counts if before else {}
        more = {unit: count - known.get(unit, 0) for unit, count in activity.counts.items()}
        for unit, count in more.items():
            self._done[unit] = self._done.get(unit, 0) + count
        if before is None or before.call != activity.call or any(more.values()):
            self.moved()

    def forget(self, place: Place) -> None:
        """Forget a process that is gone: a new one counts from 0."""
        self._activities.pop(place, None)

    def of(self, place: Place, call: Call) -> Activity | None:
        """Return a rank's report on a call; None when there is none yet."""
        activity = self._activities.get(place)
        return activity if activity is not None and activity.call == call.number else None

    def moving(self, waiting: Mapping[Place, Call]) -> Moving:
        """Return what the progress line shows."""
        at_work = [one for place, each in waiting.items() if (one := self.of(place, each)) is not None]
        units = tuple(dict.fromkeys(one.unit for one in at_work if one.unit))
        still_s = self._still_s if waiting and self._all_judged(waiting) else 0.0
        return Moving(dict(self._done), units, still_s, max((one.eta_s for one in at_work), default=0.0))

    @property
    def _still_s(self) -> float:
        return time.monotonic() - self._moved_at

    def look(self, waiting: Mapping[Place, Call], *, coming: bool = True) -> Stall | None:
        """Return the stall of ranks with a pending reply, if there is one; the clock then starts again. Call often.
        With no reply pending and no rank `coming`, the driver waits for nothing: a stall without culprits."""
        now = time.monotonic()
        missed_s, self._looked_at = now - self._looked_at, now
        if missed_s > _MISSED_S:
            self._moved_at += missed_s
        if not waiting and coming:
            self.moved()
        if self._still_s <= self.timeout_s or not self._all_judged(waiting):
            return None
        stall = self.chain(waiting)
        self.moved()
        return stall

    def _all_judged(self, waiting: Mapping[Place, Call]) -> bool:
        """Return whether every rank would count, were there progress."""
        activities = (self.of(place, one) for place, one in waiting.items())
        return all(activity is None or activity.counted for activity in activities)

    def chain(self, waiting: Mapping[Place, Call]) -> Stall:
        """Return the stall of these ranks, at least one. The culprits are those that wait for no other; where each
        waits for another, all of them."""
        activities = {place: self.of(place, one) for place, one in waiting.items()}
        idle = {place: one for place, one in activities.items() if one is None or not one.waits_for}
        culprits = idle or activities
        links = [
            f"{_name(place)} waits for {one.waits_for}" for place, one in activities.items() if one and one.waits_for
        ]
        step = next((one.step for one in waiting.values() if one.step is not None), None)
        ends = [f"{_name(place)}, which is in {self._words(waiting[place], one)}" for place, one in culprits.items()]
        who = "the driver" if step is None else f"step {step}"
        return Stall(
            tuple(culprits), "; ".join([f"{who} waits for {' and for '.join(ends)}", *links]), is_circle=not idle
        )

    def _words(self, call: Call, activity: Activity | None) -> str:
        if activity is None:
            return f"no verb, {self._still_s:.0f} s after {call.verb} was sent to it"
        parts = [activity.words()]
        without = f" without a {activity.unit}" if activity.unit else " without a sign of progress"
        parts.append(f"{self._still_s:.0f} s{without}")
        if activity.waits_for:
            parts.append(f"waiting for {activity.waits_for}")
        elif activity.where:
            parts.append(f"at {activity.where}")
        return ", ".join(parts)


def _name(place: Place) -> str:
    return f"{place[0]} rank {place[1]}"
