"""Warns of completions that no reward could grade, and ends a run that loses nearly all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rlctl.show.text_format import share
from specs.errors import GradingError

if TYPE_CHECKING:
    from rlctl.loop.sampling import Scored

HALF = 0.5  # of a step's completions: then the reward itself is broken


class RewardFailureWatch:
    """Sees the scores of steps, before anything is learned from them, or of evaluations. It warns twice at most: of the
    first failures, and of the first time that more than half of the completions were lost."""

    def __init__(self, max_failed_share: float, warn: Callable[[str], None]) -> None:
        self._max_failed_share, self._warn = max_failed_share, warn
        self._said = 0.0  # share of a step's completions above which there is news

    def see(self, scored: Scored, where: str) -> None:
        """Raises GradingError where more completions were lost than `reward.max_failed_share` of them."""
        failed, completions = sum(scored.failures.values()), scored.completions
        causes = ", ".join(f"{count} {cause.replace('_', ' ')}" for cause, count in scored.failures.items() if count)
        lost = f"{where}: {failed} of {completions} completions could not be graded ({causes})"
        first = f": {scored.first_failure}" if scored.first_failure else ""
        if scored.lost_more_than(self._max_failed_share):
            raise GradingError(
                f"{lost}, more than reward.max_failed_share = {share(self._max_failed_share)}{first}",
                hint="reward_failures.jsonl in the run directory has each with its row and the end of its traceback",
            )
        if not scored.lost_more_than(self._said):
            return
        self._said = 1.0 if scored.lost_more_than(HALF) else HALF
        self._warn(
            f"{lost}{first}. They get reward.fallback, which no mean counts and nothing is learned from. "
            "reward_failures.jsonl in the run directory says why; metrics.jsonl counts on"
        )
