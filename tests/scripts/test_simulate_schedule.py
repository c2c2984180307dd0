"""The schedule on a clock that only counts, against steps added up by hand."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from simulate_schedule import Times, schedule

TIMES = Times(rollout_s=8.0, train_s=3.0, sync_s=1.0)


@pytest.mark.parametrize(
    ("replicas", "staleness", "step_s"),
    [
        (1, 0, 8 + 3 + 1),
        (2, 0, 4 + 3 + 1),
        (1, 1, 8 + 1),  # a batch is drawn while another is learned from
        (4, 1, 3 + 1),  # learning is the longer part
        (1, 2, 8 + 1 / 2),  # two batches for a sync
        (4, 2, 3 + 1 / 2),
    ],
)
def test_a_step_by_hand(replicas: int, staleness: int, step_s: float) -> None:
    found = schedule(TIMES, replicas, staleness, steps=1000)
    assert found["step_s"] == pytest.approx(step_s, rel=0.01)
    assert found["rollout_idle"] == pytest.approx(1 - 8 / replicas / step_s, abs=0.01)
    assert found["trainer_idle"] == pytest.approx(1 - 3 / step_s, abs=0.01)
