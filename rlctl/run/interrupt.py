"""Handles Ctrl-C, SIGTERM and a closed terminal during a run."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

from specs.errors import Interrupted


class Interrupt:
    """Ctrl-C, SIGTERM and SIGHUP, turned into `Interrupted` at the next wait.

    The first one waits for an update to finish, so that the state can be saved; a second one does not. A SIGHUP that
    is ignored stays so: that is what `nohup` asks for.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self.count, self.name = 0, ""
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        for number in self.SIGNALS:
            if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.count, self.name = self.count + 1, signal.Signals(number).name

    def check(self, *, finish_first: bool = False) -> None:
        if self.count > (1 if finish_first else 0):
            raise Interrupted(f"interrupted ({self.name})", hint="go on with the same command and --resume")

    def forget(self) -> None:
        """Waiting works again until the next signal."""
        self.count = 0
