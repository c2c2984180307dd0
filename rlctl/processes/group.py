"""Keep what is in flight: the ranks of a role as the driver calls them, and the calls that they have not answered.

A rank serves one verb at a time, but any number of the concurrent ones. Calls are sent in the order in which they were
posted, as far as their ranks are free: none overtakes another on the same rank.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TypedDict, Unpack

from rlctl.processes.calls import Blobs, Bodies, Call, frames_by_rank
from rlctl.processes.channel import Hub
from rlctl.processes.rank_states import RankStates
from rlctl.processes.stall_watch import StallWatch
from specs.wire.messages import CONCURRENT_VERBS, Message, Verb


class Terms(TypedDict, total=False):
    """Options of `Group.post` that `Group.call` takes too."""

    step: int | None  # the RL step that it is part of: for the message when it fails
    timeout_s: float | None  # seconds until a rank must have answered; unset: `run.verb_timeout_s`
    ranks: Sequence[int] | None  # only these; unset: all


@dataclass(frozen=True)
class Channel:
    """Shared by all groups of a run. `tick` waits a moment for something to happen to any role, and raises
    RoleFailure; `busy` has the intervals in which ranks were at work, in no order."""

    hub: Hub
    states: RankStates
    watch: StallWatch
    tick: Callable[[], None]
    verb_timeout_s: float
    busy: list[tuple[float, float]] = field(default_factory=list)


class Group:
    """All ranks of one role, and their calls: those in line, and those in flight."""

    def __init__(self, role: str, size: int, channel: Channel) -> None:
        self.role, self.processes = role, size  # as many as the spec names
        self.concurrent: Collection[Verb] = CONCURRENT_VERBS  # a rank serves any number of them at once
        self._line: deque[Call] = deque()
        self._flying: dict[int, Call] = {}  # by number
        self._alone: set[int] = set()  # ranks that serve a verb that is not concurrent
        self._shared: Counter[int] = Counter()  # calls of concurrent verbs that a rank serves
        self.used_GiB = 0.0  # the most device memory that any rank has reported, from before it built its model on
        self._channel = channel
        self._number = 0

    @property
    def here(self) -> list[int]:
        """Return the ranks that take part: all but those that were dropped, and those that are late."""
        absent = self._channel.states.absent(self.role)
        return [rank for rank in range(self.processes) if rank not in absent]

    @property
    def size(self) -> int:
        """Return how many ranks take part."""
        return len(self.here)

    @property
    def ready(self) -> list[int]:
        """Return the ranks that take part, have not failed, and are not about to be built again."""
        return self._channel.states.running(self.role)

    @property
    def in_flight(self) -> list[Call]:
        return list(self._flying.values())

    def call(self, verb: Verb, body: Bodies = None, tensors: Blobs = None, **terms: Unpack[Terms]) -> list[Message]:
        """Call every rank and wait; return answers by rank. A single body or tensors go to all, a list one to each.

        Raise RoleFailure, RanksFailed, and BatchError when a column that the verb needs is not there.
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
        alone: bool = False,
    ) -> Call:
        """Call without waiting. The deadline counts from when the verb is sent, not from when it got in line. `alone`:
        beside no other call of a rank, though the verb is a concurrent one.

        `on_part` gets each PART as it arrives, while the driver waits for whichever role. `on_done` gets the call when
        every rank has answered, or will not. Both may post, but not wait.
        """
        self._number += 1
        ranks = self.here if ranks is None else ranks
        frames = frames_by_rank(verb, self._number, len(ranks), body, tensors)
        timeout_s = timeout_s or self._channel.verb_timeout_s
        alone = alone or verb not in self.concurrent
        call = Call(verb, self._number, frames, step, timeout_s, ranks, self._channel.tick, on_part, on_done, alone)
        self._line.append(call)
        self._send_next()
        return call

    def tick(self) -> None:
        """Wait a moment for something to happen to any role. Raise RoleFailure."""
        self._channel.tick()

    def settle(self, ranks: Callable[[], Sequence[int]] | None = None) -> None:
        """Wait until no verb is in flight or in line but concurrent ones, or none at all for any of these `ranks`."""
        while any(
            call.verb not in CONCURRENT_VERBS if ranks is None else not set(ranks()).isdisjoint(call.ranks)
            for call in (*self.in_flight, *self._line)
        ):
            self._channel.tick()

    def receive(self, rank: int, message: Message) -> None:
        """File an answer. One to a call that is over (its verb failed on another rank) is dropped."""
        if (call := self.sent(message.call)) is not None:
            call.receive(rank, message)
            self.used_GiB = max(self.used_GiB, float(message.body.get("used_GiB", 0.0)))
            if message.busy is not None:
                begin, end = message.busy
                now = time.monotonic()
                if not call.sent_before(begin) or end > now:  # by the clock of another host, which began elsewhere
                    begin, end = now - (end - begin), now
                self._channel.busy.append((begin, end))
            if call.done:
                self.drop(call)

    def sent(self, number: int) -> Call | None:
        """Return the call of this number, if it is in flight."""
        return self._flying.get(number)

    def fail(self, rank: int, number: int | None = None) -> None:
        """Expect no answer from a rank to the call in flight (only if it has this number)."""
        for call in self.in_flight:
            if number in (None, call.number) and rank in call.missing:
                call.fail(rank)
                if call.done:
                    self.drop(call)

    def drop(self, call: Call) -> None:
        """End a call in flight."""
        del self._flying[call.number]
        if call.alone:
            self._alone.difference_update(call.ranks)
        else:
            self._shared.subtract(call.ranks)
        if call.on_done is not None and call.done:
            call.on_done(call)
        self._send_next()

    def _send_next(self) -> None:
        """Send what is in line to ranks that are free for it."""
        states, hub = self._channel.states, self._channel.hub
        while (call := self._next()) is not None:
            self._line.remove(call)
            self._flying[call.number] = call
            if call.alone:
                self._alone.update(call.ranks)
            else:
                self._shared.update(call.ranks)
            absent = states.unreachable(self.role)
            self._channel.watch.moved()
            for rank, frames in zip(call.ranks, call.start(), strict=True):
                if rank in absent:
                    call.fail(rank)
                else:
                    hub.send(self.role, rank, frames)
            if call.done:
                self.drop(call)

    def _next(self) -> Call | None:
        """Return the first call in line whose ranks are free for it and not waited for by one before it."""
        taken: set[int] = set()
        for call in self._line:
            busy = any(rank in self._alone or (call.alone and self._shared[rank] > 0) for rank in call.ranks)
            if not busy and taken.isdisjoint(call.ranks):
                return call
            taken.update(call.ranks)
            if len(taken) >= self.processes:
                return None
        return None
