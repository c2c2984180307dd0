"""Handle Ctrl-C, SIGTERM and a closed terminal during a run."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from specs.errors import Interrupted

SAME_PRESS_S = 1.0  # signals that follow so soon are the same one: a wrapper passes it on, or a finger slips


class Interrupt:
    """Turn Ctrl-C, SIGTERM and SIGHUP into `Interrupted` at the next wait.

    The first one waits for an update to finish, so that the state can be saved; a second one does not. A SIGHUP that
    is ignored stays so: that is what `nohup` asks for.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say, self._told, self._at_once = say, False, False
        self.count, self.name = 0, ""
        self._last = -SAME_PRESS_S
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        for number in _heard(*self.SIGNALS):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if now - self._last >= SAME_PRESS_S:
            self.count, self.name, self._last = self.count + 1, signal.Signals(number).name, now
            if self._at_once:
                raise KeyboardInterrupt

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Raise `Interrupted` wherever a signal comes: what a foreign package waits for has no `check`."""
        self._at_once = True
        try:
            yield
        except KeyboardInterrupt:
            self.check()
        finally:
            self._at_once = False

    def check(self, *, finish_first: bool = False) -> None:
        if finish_first and self.count == 1 and not self._told:
            self._told = True
            self.say(f"{self.name}: an update or a save is finished first (once more ends the run at once)")
        if self.count > (1 if finish_first else 0):
            raise Interrupted(f"interrupted ({self.name})", hint="continue with the same command and --resume")

    def forget(self) -> None:
        """Let waiting work again until the next signal."""
        self.count = 0


@contextmanager
def as_ctrl_c() -> Iterator[None]:
    """Raise KeyboardInterrupt for SIGTERM and a closed terminal, as Ctrl-C does; a SIGHUP that is ignored stays so."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in _heard(signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _heard(*numbers: signal.Signals) -> list[signal.Signals]:
    """Return those that this process takes: only the main thread hears signals, and a SIGHUP may be ignored."""
    if threading.current_thread() is not threading.main_thread():
        return []
    return [number for number in numbers if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN]
