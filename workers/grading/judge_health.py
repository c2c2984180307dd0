"""Whether a judge answers. One that is down is not asked for every completion, only now and then whether it is up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from workers.grading.judge_line import RETRIED, JudgeError

DOWN_AFTER = 8  # requests in a row that failed, each with all its tries
FIRST_PROBE_S, LONGEST_PROBE_S = 5.0, 60.0
DOWN = "judge_down"


class JudgeHealth:
    """Threads share it. A status other than 5xx is an answer too: a judge that is busy, or refuses a request, is up."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._failed = 0  # in a row
        self._said = ""  # of the last of them
        self._wait_s = self._probe_at = 0.0
        self.down = False

    def tries(self, allowed: int) -> int:
        """How often a request may be sent: once where it finds out whether the judge is up again. Raises JudgeError
        while it is down."""
        with self._lock:
            if not self.down:
                return allowed
            if self._clock() < self._probe_at:
                text = f"the judge is down, and not asked: {self._failed} requests in a row failed ({self._said})"
                raise JudgeError(DOWN, f"{text}; it is tried again after {self._wait_s:g} s", again=False)
            self._wait_longer(2 * self._wait_s)
            return 1

    def answered(self) -> None:
        with self._lock:
            self._failed, self.down = 0, False

    def failed(self, error: JudgeError) -> None:
        """A request has failed for good."""
        if not error.again or error.status in RETRIED:
            self.answered()
            return
        with self._lock:
            self._failed, self._said = self._failed + 1, str(error)
            if self._failed >= DOWN_AFTER and not self.down:
                self.down = True
                self._wait_longer(FIRST_PROBE_S)

    def _wait_longer(self, wait_s: float) -> None:
        self._wait_s = min(wait_s, LONGEST_PROBE_S)
        self._probe_at = self._clock() + self._wait_s
