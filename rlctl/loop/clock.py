"""Measure where the time of a step goes: its phases, and within `rollout` the wait for grades."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from specs.phases import GRADING_METRIC, TIME_METRICS, Phase
from specs.schema.metric import Metric, metrics

METRICS: tuple[Metric, ...] = metrics(
    "",
    {
        "time/step_s [s]": "The step, without evaluations and checkpoints.",
        "time/rollout_s [s]": "Waiting for completions, without the wait for grades.",
        "time/reward_s [s]": "Every completion is there, waiting for grades.",
        "time/update_s [s]": "Log-probs before the update, gradients, optimizer steps.",
        "time/sync_s [s]": "Weights from the actor to the rollout, with the proofs.",
    },
)


class Clock:
    """Measures one step at a time, from `start` on."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """A step begins: forget the last one."""
        self._started = time.perf_counter()
        self._seconds: dict[Phase | Literal["grading"], float] = {}
        self._spans: dict[Phase | Literal["grading"], tuple[float, float]] = {}

    @contextmanager
    def measure(self, phase: Phase | Literal["grading"]) -> Iterator[None]:
        """Add the seconds of the block to those of `phase`, also of a block that raises. "grading": it waits for grades
        alone, within the phase `rollout`."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            end = time.perf_counter()
            self._seconds[phase] = self._seconds.get(phase, 0.0) + end - begin
            self._spans[phase] = begin, end

    def span(self, phase: Phase) -> tuple[float, float]:
        """When the phase last began and ended (`time.perf_counter`)."""
        return self._spans[phase]

    def metrics(self) -> dict[str, float]:
        """The step's times until now, as metrics."""
        seconds = {metric: self._seconds.get(phase, 0.0) for phase, metric in TIME_METRICS.items()}
        grading_s = self._seconds.get("grading", 0.0)
        seconds[TIME_METRICS["rollout"]] -= grading_s
        return {"time/step_s": time.perf_counter() - self._started, **seconds, GRADING_METRIC: grading_s}
