"""Batches on their way to their step: with `rollout.max_staleness = n` the rollout works on up to n steps to come while
the actor learns.

The *version* of weights is the number of steps that the actor had finished when they were sent; a sample's *staleness*
in step s is s - 1 - version. When the last batch that was sent out is the next to be learned from, the weights are
synced, and the n batches after it go out together:

    n = 0     sync 0, sample 1, learn 1 │ sync 1, sample 2, learn 2 │ …
    n = 1     sample 1, 2 with 0 │ learn 1 │ sync 1: sample 3 ∥ learn 2 │ sync 2: sample 4 ∥ learn 3 │ …
    n = 2     sample 1, 2, 3 with 0 │ learn 1, 2 │ sync 2: sample 4, 5 ∥ learn 3, 4 │ sync 4: …

So the schedule follows from the step's number alone, never from who was quicker: a run repeats, and a resumed run goes
on, to the bit. Staleness is 1 to n in turn, and only every n-th step syncs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from rlctl.sampling import SAMPLES_SHOWN, Drawn, Sampler
from specs.batch import Batch
from specs.schema import Spec

if TYPE_CHECKING:
    from rlctl.calls import Call
    from rlctl.sampling import Generation
    from rlctl.step_metrics import Clock


@dataclass
class Planned:
    """The batch of one step: still being written, or drawn. `start` and `end`: the data cursor before and after it."""

    number: int
    start: int
    end: int
    generation: Generation | None = None
    drawn: Drawn | None = None

    def finish(self, clock: Clock) -> Drawn:
        """Wait for samples and scores."""
        if self.drawn is None:
            assert self.generation is not None
            self.drawn = self.generation.finish(clock)
        return self.drawn


@dataclass
class RunAhead:
    """The line of batches, the next to be learned from first. Prompts of a batch leave the data's cursor behind them
    when they are sent out; what is in line belongs to a checkpoint."""

    spec: Spec
    sampler: Sampler
    position: int = 0  # the data cursor after the newest batch in line, or after the last that was learned from
    line: deque[Planned] = field(default_factory=deque)
    dropped: int = 0  # samples that were too old, since the last step
    _prompts: tuple[int, int, Call] | None = None  # cursor, batches, and where they come from: asked for in advance

    @property
    def most(self) -> int:
        return self.spec.rollout.max_staleness

    @property
    def cursor(self) -> int:
        """The data cursor after the last batch that was learned from."""
        return self.line[0].start if self.line else self.position

    def newest(self, done: int) -> int:
        """The last step whose batch has been sent out, after `done` steps."""
        return self.line[-1].number if self.line else done

    def due(self, done: int) -> bool:
        """Whether new weights go out after step `done`: nothing is in line beyond the next step's batch, and there is
        more to draw. After the last step too: what the run ends with is verified."""
        newest, steps = self.newest(done), self.spec.run.steps
        return newest <= done + 1 and (newest < steps or done == steps)

    # ── sending out ───────────────────────────────────────────────────────────────────────────────

    def fill(self, number: int) -> None:
        """Before step `number`: send out all batches that may be drawn with the weights of now."""
        done = number - 1
        if not self.due(done):
            return
        first, last = self.newest(done) + 1, min(number + self.most, self.spec.run.steps)
        if first > last:
            return
        prompts, ends = self._draw(last - first + 1, number)
        for index, batch_number in enumerate(range(first, last + 1)):
            generation = self.sampler.start(prompts[index], self.sampler.training(), batch_number, show=SAMPLES_SHOWN)
            self.line.append(Planned(batch_number, self.position, ends[index], generation))
            self.position = ends[index]
        if self.most:
            self._ask_for_prompts(min(self.most, self.spec.run.steps - last), number)

    def _ask_for_prompts(self, batches: int, number: int) -> None:
        """Those of the next filling, before answers to judge keep the role that holds the data busy."""
        self._prompts = None
        if batches > 0:
            call = self.sampler.ask_for_steps(self.position, batches, number)
            self._prompts = (self.position, batches, call)

    def _draw(self, batches: int, number: int) -> tuple[list[Batch], list[int]]:
        """Prompts of so many steps, and the cursor after each."""
        if self._prompts is None or self._prompts[:2] != (self.position, batches):
            self._prompts = (self.position, batches, self.sampler.ask_for_steps(self.position, batches, number))
        answer, self._prompts = self._prompts[2].result()[0], None
        each = self.spec.data.prompts_per_step
        ends = [self.position + each * (index + 1) for index in range(batches)]
        assert int(answer.body["position"]) == ends[-1], "the training data has no end"
        rows = np.split(np.arange(len(answer.batch)), batches)
        return [answer.batch.select(chosen) for chosen in rows], ends

    # ── taking in ─────────────────────────────────────────────────────────────────────────────────

    def take(self, number: int, clock: Clock) -> Drawn:
        """The batch of step `number`, without what is too old. It stays in line until `learned`."""
        planned = self.line[0]
        assert planned.number == number, f"step {number} cannot learn from the batch of step {planned.number}"
        drawn = planned.finish(clock)
        fresh = drawn.fresh(number, self.most)
        self.dropped += len(drawn.batch) - len(fresh.batch)
        planned.drawn = fresh
        return fresh

    def learned(self) -> None:
        """The step that took the first batch in line is over."""
        self.line.popleft()

    def written(self) -> None:
        """Wait until nothing is being sampled."""
        for planned in self.line:
            if planned.generation is not None and planned.drawn is None:
                planned.generation.wait()

    def take_metrics(self, batch: Batch, number: int, overlap_s: float) -> dict[str, float | int]:
        """How old step `number`'s samples are, in steps, and how many were too old; nothing without running ahead."""
        dropped, self.dropped = self.dropped, 0
        if not (self.most or dropped):
            return {}
        staleness_B = number - 1 - batch["version_B"]
        return {
            "rollout/staleness_mean": float(staleness_B.mean()),
            "rollout/staleness_max": int(staleness_B.max()),
            "rollout/dropped_stale": dropped,
            "rollout/overlap_s": overlap_s,  # of the update, with others being sampled
        }

    def overlap_s(self, start: float, end: float) -> float:
        """Seconds between `start` and `end` (`time.perf_counter`) in which samples of later steps were written."""
        total, free_at = 0.0, 0.0
        for planned in self.line:
            if planned.generation is not None:
                begin = max(planned.generation.sent_at, free_at)
                free_at = planned.generation.written_at or end
                total += max(0.0, min(free_at, end) - max(begin, start))
        return total

    # ── checkpoints ───────────────────────────────────────────────────────────────────────────────

    def drain(self, clock: Clock) -> Sequence[Planned]:
        """Everything in line, written and judged: what a checkpoint keeps beside the cursor. Without running ahead
        there is nothing to keep: an unfinished step is drawn again, with the same weights."""
        if not self.most:
            return ()
        for planned in self.line:
            planned.finish(clock)
        return tuple(self.line)

    def restore(self, position: int, kept: Sequence[Planned]) -> Mapping[int, int]:
        """Go on from a checkpoint. A batch that would be too old in its step is left out with all after it: their
        prompts are drawn again. Returns how many samples that were, by step."""
        self.position, self.line = position, deque()
        left_out: dict[int, int] = {}
        for planned in kept:
            assert planned.drawn is not None
            if left_out or not len(planned.drawn.fresh(planned.number, self.most).batch):
                left_out[planned.number] = len(planned.drawn.batch)
            else:
                self.line.append(planned)
                self.position = planned.end
        self.dropped = sum(left_out.values())
        return left_out
