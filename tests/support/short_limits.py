"""Limits of `check-config` that count from when the code that it calls hangs, however late that is."""

from __future__ import annotations

import select
from pathlib import Path

import pytest

from rlctl.check.trial_process import TrialProcess

_LOOK_S = 0.02


def count_from(monkeypatch: pytest.MonkeyPatch, marker: Path) -> None:
    """A wait for a reward function's answer is over only some time after `marker` is there."""
    wait = TrialProcess._next_line

    def next_line(self: TrialProcess, timeout_s: float) -> bytes:
        while not select.select([self.process.stdout], [], [], _LOOK_S)[0] and not marker.exists():
            pass
        return wait(self, timeout_s)

    monkeypatch.setattr(TrialProcess, "_next_line", next_line)
