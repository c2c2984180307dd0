"""A clock that a test sets by hand."""

from __future__ import annotations


class HandClock:
    """Stands in for the module `time`, so that tests wait for nothing."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now
