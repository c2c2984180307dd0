"""The short form of `scripts/chaos`, and that a run which does not reach its numbers is bad."""

from __future__ import annotations

from pathlib import Path

import pytest
from chaos_faults import SIGNALS, Fault, all_faults, chosen
from chaos_runs import LAUNCHED, Stage, try_fault

pytestmark = pytest.mark.slow


def test_other_numbers_are_bad(tmp_path: Path) -> None:
    stage = Stage("fake", tmp_path / "fake")
    stage.plain[-1] = (*stage.plain[-1][:-2], 0.0, 0.0)
    line = try_fault(stage, Fault("fake", "train", "SIGKILL", "reward 0"), tmp_path / "fault")
    assert line.bad == ["other numbers after --resume"]
    assert line.named.startswith("reward rank 0")


def test_a_seed_repeats_and_every_kind_is_there() -> None:
    engines = ("fake", "ddp")
    faults = chosen(engines, LAUNCHED, 160, 0)
    assert faults == chosen(engines, LAUNCHED, 160, 0) != chosen(engines, LAUNCHED, 160, 1)
    assert len(set(faults)) == 160
    fake = [fault for fault in faults if fault.engine == "fake"]
    rare = {fault.kind for fault in all_faults("fake", False) if fault.kind not in SIGNALS}
    assert {fault.kind for fault in fake} == {*rare, *SIGNALS}
