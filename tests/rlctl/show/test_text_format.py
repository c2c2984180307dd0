"""Numbers, durations and sparklines as text."""

from __future__ import annotations

import math

import pytest

from rlctl.show.text_format import count, duration, number, sparkline, time_shares


def test_sparkline_runs_from_lowest_to_highest() -> None:
    assert sparkline([0.0, 0.5, 1.0], 10) == "▁▅█"
    assert sparkline([1.0, 1.0], 10) == "▁▁"
    assert sparkline([None, math.nan, 2.0, 3.0], 10) == "▁█"
    assert sparkline([], 10) == sparkline([1.0], 0) == ""
    assert len(sparkline([1e6, -1e6] * 100, 80)) == 80


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.73149, "0.731"), (-0.001237, "-0.00124"), (1.2e-6, "1.20e-06"), (12, "12"), (1.0, "1"), (0, "0"), (None, "–"),
     (math.nan, "–"), (math.inf, "–"), (123456.7, "123457"), (2.5e9, "2.50e+09"), (45.678, "45.7")],
)  # fmt: skip
def test_number(value: float | None, text: str) -> None:
    assert number(value) == text


def test_count_and_duration() -> None:
    assert [count(value) for value in (950, 12_400, 3.1e6, None)] == ["950", "12.4k", "3.1M", "–"]
    assert [duration(value) for value in (42.2, 727, 11_527, 180_000, None)] == [
        "0:42", "12:07", "3:12:07", "2d 02:00", "–",
    ]  # fmt: skip


def test_time_shares_keep_the_order_of_a_step_and_name_the_rest_other() -> None:
    records = [
        {
            "time/step_s": 2.0,
            "time/update_s": 1.0,
            "time/rollout_s": 0.5,
            "time/x_s": 0.1,
            "time/driver_s": 0.6,  # of which phases hold all or most
            "time/restart_s": 0.3,
            "time/wall_s": 9.0,
            "reward/mean": 9.0,
        }
    ]
    shares = time_shares(records)
    assert list(shares) == ["rollout", "train", "x", "other"]
    assert shares == pytest.approx({"rollout": 0.25, "train": 0.5, "x": 0.05, "other": 0.2})
