"""Who grades what: samples go to whichever rank of the reward role has nothing to do, and from one that fails to
another."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from specs.wire import bodies
from specs.wire.messages import Message, Verb

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from rlctl.loop.recovery import SteadyGrading
    from rlctl.processes.calls import Call
    from rlctl.processes.group import Group


@dataclass(eq=False)
class Grading:
    """Samples to be graded."""

    request: bodies.Score
    columns: Mapping[str, NDArray[Any]]
    step: int
    graders: Graders
    answer: Message | None = None

    def result(self) -> Message:
        """Wait for their scores. Raises RoleFailure when a rank fails that the run cannot continue without."""
        while self.answer is None:
            self.graders.wait(self.step)
        return self.answer


class Graders:
    """The ranks of the reward role. Each is at `at_once` parts at a time, and gets the next when it has answered."""

    def __init__(self, group: Group, at_once: int = 1, steady: SteadyGrading | None = None) -> None:
        """`steady` restores failed ranks; None: nothing does."""
        self.group, self._at_once, self._steady = group, at_once, steady
        self._waiting: deque[Grading] = deque()
        self._at_work: Counter[int] = Counter()  # parts, by rank
        self._last: list[int] = []  # ranks, those first that got their last part first

    def grade(self, request: bodies.Score, columns: Mapping[str, NDArray[Any]], step: int) -> Grading:
        """Have these samples graded; returns at once."""
        grading = Grading(request, columns, step, self)
        self._waiting.append(grading)
        self.hand_out()
        return grading

    def restore(self, step: int) -> None:
        """Let failed ranks grade again, and those that have come late."""
        if self._steady is not None and self._steady.restore(step):
            self.hand_out()

    def wait(self, step: int) -> None:
        """Wait a moment. Where no rank can be called, those that failed are restored at once."""
        if not self.group.ready:
            self.restore(step)
        self.group.tick()

    def hand_out(self) -> None:
        """Give what is waiting to the ranks that have least to do, also to those that have just come. Who has had
        nothing for the longest time comes first."""
        while self._waiting and (free := [rank for rank in self.group.ready if self._at_work[rank] < self._at_once]):
            self._send(min(free, key=self._turn), self._waiting.popleft())

    def _turn(self, rank: int) -> tuple[int, int]:
        return self._at_work[rank], self._last.index(rank) if rank in self._last else -1

    def _send(self, rank: int, part: Grading) -> None:
        self._at_work[rank] += 1
        self._last = [*(one for one in self._last if one != rank), rank]
        on_done = partial(self._take, rank, part)
        self.group.post(Verb.SCORE, part.request, part.columns, step=part.step, ranks=[rank], on_done=on_done)

    def _take(self, rank: int, part: Grading, call: Call) -> None:
        self._at_work[rank] -= 1
        if call.failed:
            self._waiting.appendleft(part)
        else:
            (part.answer,) = call.result()
        self.hand_out()
