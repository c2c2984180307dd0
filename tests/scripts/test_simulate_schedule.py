"""The schedule on a clock that only counts, against steps added up by hand."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from simulate_schedule import Times, advice, schedule, times_of

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


def test_what_to_change() -> None:
    """8 s of sampling, 3 of learning, 1 of sync: a step of 12 s becomes one of 8.5, and of 4.5 with two replicas."""
    assert advice(TIMES, 1) == (
        "rollout.max_staleness = 2: 1.40× as fast as now; trainers then wait 65% of the time, rollouts 7%. "
        "With 2 replicas 2.63×"
    )
    assert advice(Times(8.0, 4.0, 0.0), 4) == (
        "rollout.max_staleness = 1: 1.49× as fast as now; trainers then wait 1% of the time, rollouts 50%. "
        "2 replicas would do: 1.48×"
    )


def test_a_run_that_does_not_tell(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"metrics\.jsonl: No such file"):
        times_of(tmp_path, 1)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    for staleness, why in ((0, "no step after the first"), (2, "it ran ahead")):
        (tmp_path / "resolved.json").write_text(json.dumps({"rollout": {"max_staleness": staleness}}))
        with pytest.raises(SystemExit, match=why):
            times_of(tmp_path, 1)
