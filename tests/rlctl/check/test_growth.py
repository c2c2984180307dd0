"""Completions that take longer and longer to grade."""

from __future__ import annotations

import pytest

from rlctl.check.growth import slow_pattern, slowest_growth


@pytest.mark.parametrize("pattern", [r"^(\w+\s?)+$", r"<think>(\s*\S+\s*)*</think>", r"(\d+,?)+\."])
def test_a_pattern_that_backtracks_is_found(pattern: str) -> None:
    slow = slow_pattern(pattern, max_tokens=1024, limit_s=10)
    assert slow is not None
    assert len(slow[0]) < 100
    assert slow[2] > 10


@pytest.mark.parametrize(
    "pattern", [r"<answer>(.*?)</answer>", r"^<think>.*?</think>\s*<answer>.*?</answer>$", r"\d+$"]
)
def test_a_pattern_of_usual_kind_is_not(pattern: str) -> None:
    assert slow_pattern(pattern, max_tokens=4096, limit_s=10) is None


@pytest.mark.parametrize(
    ("power", "factor", "found"), [(1.0, 1e-5, False), (3.0, 1e-6, True), (2.0, 1e-6, True), (2.0, 1e-9, False)]
)
def test_growth_is_told_by_its_power(power: float, factor: float, found: bool) -> None:
    slow = slowest_growth(lambda text: factor * len(text) ** power, max_tokens=4096, limit_s=10, until_s=60)
    assert (slow is not None) == found


def test_what_does_not_end_is_told() -> None:
    slow = slowest_growth(lambda text: None if len(text) > 20 else 0.0, max_tokens=64, limit_s=10, until_s=60)
    assert slow is not None
    assert slow[1] == float("inf")
