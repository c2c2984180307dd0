"""Answers that no reward could judge: said while it can still be mended, not only counted."""

from __future__ import annotations

from collections.abc import Callable, Mapping

MOST = 0.5  # of a step's answers: the reward itself is broken, not an answer odd


class UnjudgedWatch:
    """Sees each step's failures and warns twice at most: of the first, and of the first step that lost most answers."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._said = 0.0  # share of a step's answers above which there is news

    def see(self, failures: Mapping[str, int], answers: int, step: int) -> None:
        """`failures`: how many of the step's `answers` were lost to each cause."""
        failed = sum(failures.values())
        if failed <= self._said * answers:
            return
        self._said = MOST if failed <= MOST * answers else 1.0
        causes = ", ".join(f"{count} {cause.replace('_', ' ')}" for cause, count in failures.items() if count)
        self._warn(
            f"step {step}: {failed} of {answers} answers could not be judged ({causes}); they get reward.fallback and "
            "teach nothing. reward_failures.jsonl in the run directory says why; reward/failed_* counts on"
        )
