"""Completions that are never graded, in a pool with a generous limit: on a busy machine any grade may take seconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from workers.grading.pool import GraderPool

LIMIT_S = 90.0
_LOOK_S = 0.02


@contextmanager
def given_up(pool: GraderPool, completion: str, after_s: float = 0.25) -> Iterator[None]:
    """Inside, the limit of whoever grades this completion is over soon."""
    done = threading.Event()

    def look() -> None:
        since: dict[tuple[int, int], float] = {}
        while not done.wait(_LOOK_S):
            for process in [*pool._processes.values()]:
                with suppress(IndexError):  # it has just been graded
                    index = process.job[0]
                    if pool._requests[index].completion != completion:
                        continue
                    now = time.monotonic()
                    if now - since.setdefault((process.process.pid, index), now) > after_s:
                        process.deadline = 0.0

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
