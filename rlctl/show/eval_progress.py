"""Show `rlctl eval` while it runs: how many completions of each set are here, and when all will be."""

from __future__ import annotations

import time

from rich.console import Group, RenderableType
from rich.text import Text

from rlctl.show.progress import Progress
from rlctl.show.screen import Screen
from rlctl.show.text_format import duration
from specs.phases import Phase
from specs.schema.eval_sets import Evaluation

LINE_S = 5.0  # between two plain lines


class EvalProgress(Progress):
    """Count completions instead of steps."""

    unit = "completion"

    def __init__(self, name: str, total: int, console: Screen | None = None, live: bool | None = None) -> None:
        super().__init__(total, 0, name, console, live)
        self._before = 0  # of the sets that are done
        self._sampling_since = 0.0

    def phase(self, phase: Phase, doing: str = "") -> None:
        if phase == "rollout" and doing:
            self._before = self._step
            self._sampling_since = self._sampling_since or time.monotonic()
        super().phase(phase, doing)

    def arrived(self, one: Evaluation, done: int, of: int) -> None:
        """Show that so many completions of a set are here."""
        self._step = self._before + done
        if self.live:
            self.tick()
        elif self._step >= self._total or time.monotonic() - self._last_line >= LINE_S:
            self._print(f"eval {one.name}  {done}/{of} completions  ETA {duration(self.eta_s)}")

    @property
    def eta_s(self) -> float | None:
        """Estimate the seconds left at the pace of the completions that are here."""
        spent = time.monotonic() - self._sampling_since
        return spent / self._step * (self._total - self._step) if self._step else None

    def render(self) -> RenderableType:
        return Group(self._head(), Text.assemble(("now    ", "bold"), self._now_row(max(20, self.console.width - 9))))
