"""Ctrl-C, SIGTERM and a closed terminal: which signals count, and how often."""

from __future__ import annotations

import os
import signal

import pytest

from rlctl.run import interrupt as module
from rlctl.run.interrupt import Interrupt
from specs.errors import Interrupted


def test_a_signal_that_comes_twice_at_once_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrapper passes it on, too: the update that has begun is finished all the same, and its step saved."""
    told: list[str] = []
    with Interrupt(told.append) as interrupt:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
        for _ in range(2):
            interrupt.check(finish_first=True)
        assert told == ["SIGINT: an update or a save is finished first (once more ends the run at once)"]
        monkeypatch.setattr(module, "SAME_PRESS_S", 0.0)
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(Interrupted, match=r"interrupted \(SIGINT\)"):
            interrupt.check(finish_first=True)


def test_nohup_is_heeded():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupt(print) as interrupt:
            os.kill(os.getpid(), signal.SIGHUP)
            interrupt.check()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        with Interrupt(print) as interrupt:
            os.kill(os.getpid(), signal.SIGHUP)
            with pytest.raises(Interrupted, match=r"interrupted \(SIGHUP\)"):
                interrupt.check()
    finally:
        signal.signal(signal.SIGHUP, before)
