"""A fault of `scripts/chaos`: a run which does not reach its numbers is bad."""

from __future__ import annotations

from pathlib import Path

import pytest
from chaos_runs import Fault, Stage, try_fault

pytestmark = pytest.mark.slow


def test_other_numbers_are_bad(tmp_path: Path) -> None:
    stage = Stage("fake", tmp_path / "fake")
    stage.plain[-1] = (*stage.plain[-1][:-2], 0.0, 0.0)
    line = try_fault(stage, Fault("fake", "train", "SIGKILL", "reward 0"), tmp_path / "fault")
    assert line.bad == ["other numbers after --resume"]
    assert "reward rank 0" in line.named
