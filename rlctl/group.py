"""One role: the driver calls a verb on it, one verb at a time, and gets an answer from every rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypedDict, Unpack

from rlctl.calls import Blobs, Bodies, Call, frames_by_rank
from specs.messages import Message, Verb

if TYPE_CHECKING:
    from rlctl.groups import Groups


class Terms(TypedDict, total=False):
    """How a verb is called, of what `Group.post` takes."""

    step: int | None  # the step that it is part of: for the message where it fails
    timeout_s: float | None  # seconds until a rank must have answered; unset: `run.verb_timeout_s`
    ranks: Sequence[int] | None  # only these; unset: all


class Group:
    """All ranks of one role. One verb is in flight at a time; further ones wait in line."""

    def __init__(self, role: str, size: int, groups: Groups) -> None:
        self.role, self.size = role, size
        self.line: deque[Call] = deque()  # the first is in flight
        self._groups = groups
        self.used_GiB = 0.0  # the most that any rank said it has held of its device since before it built its model
        self._number = 0

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
    ) -> Call:
        """As `call`, without waiting. The deadline counts from when the verb is sent, not from when it got in line.

        `on_part` gets each PART as it arrives, while the driver waits for whichever role. It may post, but not wait.
        """
        groups = self._groups
        self._number += 1
        frames = frames_by_rank(verb, self._number, self.size if ranks is None else len(ranks), body, tensors)
        call = Call(verb, self._number, frames, step, timeout_s or groups.verb_timeout_s, groups.tick, on_part, ranks)
        self.line.append(call)
        self.send_next()
        return call

    def send_next(self) -> None:
        """Send the first in line unless it is on its way."""
        if self.line and not self.line[0].sent:
            call, gone = self.line[0], self._groups.losses.ranks(self.role)
            for rank, frames in zip(call.ranks, call.start(), strict=True):
                if rank in gone:
                    call.lose(rank)
                else:
                    self._groups.hub.send(self.role, rank, frames)
            if call.done:
                self.drop()

    def take(self, rank: int, message: Message) -> None:
        """File an answer. One to a call that is over (its verb failed on another rank) is dropped."""
        if self.line and self.line[0].number == message.call:
            self.line[0].take(rank, message)
            self.used_GiB = max(self.used_GiB, float(message.body.get("used_GiB", 0.0)))
            if message.busy is not None:
                self._groups.busy.append(message.busy)
            if self.line[0].done:
                self.drop()

    def lose(self, rank: int, number: int | None = None) -> None:
        """The verb in flight (only if it has this number) gets no answer from a rank."""
        if self.line and self.line[0].sent and number in (None, self.line[0].number):
            self.line[0].lose(rank)
            if self.line[0].done:
                self.drop()

    def settle(self) -> None:
        """Wait until no verb is in flight or in line."""
        while self.line:
            self._groups.tick()

    def drop(self) -> None:
        """The verb in flight is over."""
        self.line.popleft()
        self.send_next()
