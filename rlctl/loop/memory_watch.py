"""Memory that a role still holds after it has left a shared device must stay flat over a run.

Watched is what is measured right after a rollout fell asleep or a trainer offloaded. A role leaks when the last
`WINDOW` cycles grow steadily: the slope through them (Theil 1950, Sen 1968: the median of the slopes of all pairs) is
over `MIN_SLOPE_MIB` a cycle, and every quarter of them lies above the one before. Noise has no slope; around one jump
(an allocator's new arena, a longer batch) there are quarters that do not rise. The first such window is a warning; it
is an error when the role holds `run.max_memory_growth_GiB` more than after the warm-up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from specs.errors import MemoryGrowthError

WARM_UP = 4  # cycles in which libraries still allocate what they keep
WINDOW = 16
MIN_SLOPE_MIB = 4.0
MIN_RISE = 0.25  # of what the slope promises, from one quarter to the next
SUFFIXES = ("_asleep_GiB", "_offloaded_GiB")


def slope(values: Sequence[float]) -> float:
    """Median of the slopes through all pairs of equally spaced values: per cycle, in the values' unit."""
    held = np.asarray(values, dtype=np.float64)
    first, second = np.triu_indices(len(held), k=1)
    return float(np.median((held[second] - held[first]) / (second - first)))


def steady_growth_MiB(held_GiB: Sequence[float]) -> float:
    """MiB per cycle by which a full window grows from quarter to quarter; 0.0 where it does not."""
    if len(held_GiB) < WINDOW:
        return 0.0
    per_cycle = slope(held_GiB)
    quarters = [float(np.median(quarter)) for quarter in np.split(np.asarray(held_GiB[-WINDOW:]), 4)]
    least = MIN_RISE * per_cycle * WINDOW / 4
    steady = per_cycle * 1024 > MIN_SLOPE_MIB and all(rise >= least for rise in np.diff(quarters))
    return per_cycle * 1024 if steady else 0.0


class MemoryWatch:
    """Sees each step's memory metrics. `max_growth_GiB` is when growth ends the run."""

    def __init__(self, max_growth_GiB: float, warn: Callable[[str], None]) -> None:
        self.max_growth_GiB = max_growth_GiB
        self._warn = warn
        self._cycles: dict[str, int] = {}
        self._first: dict[str, float] = {}
        self._window: dict[str, deque[float]] = {}
        self._warned: set[str] = set()

    def see(self, metrics: Mapping[str, float], step: int) -> None:
        """Take in a step's metrics `mem/ROLE_asleep_GiB` and `mem/ROLE_offloaded_GiB`. Raises MemoryGrowthError."""
        for name, held_GiB in metrics.items():
            if name.startswith("mem/") and name.endswith(SUFFIXES):
                self._see(name, float(held_GiB), step)

    def _see(self, name: str, held_GiB: float, step: int) -> None:
        self._cycles[name] = self._cycles.get(name, 0) + 1
        if self._cycles[name] <= WARM_UP:
            return
        first = self._first.setdefault(name, held_GiB)
        window = self._window.setdefault(name, deque(maxlen=WINDOW))
        window.append(held_GiB)
        per_cycle = steady_growth_MiB(list(window))
        if not per_cycle:
            return
        said = (
            f"{name} grows by {per_cycle:.1f} MiB a step, over the last {WINDOW} steps: {held_GiB:.2f} GiB at step "
            f"{step}, {first:.2f} after the warm-up"
        )
        if held_GiB - first > self.max_growth_GiB:
            raise MemoryGrowthError(
                f"memory is not released: {said}; allowed is run.max_memory_growth_GiB = {self.max_growth_GiB:g}",
                hint="something outlives each step: an engine's cache, a captured graph, a custom engine's buffers. "
                "Going on with the same command and --resume starts with fresh processes",
            )
        if name not in self._warned:
            self._warned.add(name)
            self._warn(f"{said}. At {self.max_growth_GiB:g} GiB more (run.max_memory_growth_GiB) the run stops")
