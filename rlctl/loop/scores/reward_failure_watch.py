"""Warns of completions that no reward could grade, while the reward can still be fixed."""

from __future__ import annotations

from collections.abc import Callable, Mapping

HALF = 0.5  # of a step's completions: then the reward itself is broken


class RewardFailureWatch:
    """Sees each step's failures and warns twice at most: of the first, and of the first step that lost more than
    half of its completions."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._said = 0.0  # share of a step's completions above which there is news

    def see(self, failures: Mapping[str, int], completions: int, step: int) -> None:
        """`failures`: how many of the step's `completions` were lost to each cause."""
        failed = sum(failures.values())
        if failed <= self._said * completions:
            return
        self._said = HALF if failed <= HALF * completions else 1.0
        causes = ", ".join(f"{count} {cause.replace('_', ' ')}" for cause, count in failures.items() if count)
        self._warn(
            f"step {step}: {failed} of {completions} completions could not be graded ({causes}); they get "
            "reward.fallback and an advantage of 0. reward_failures.jsonl in the run directory says why; "
            "reward/failed_* counts on"
        )
