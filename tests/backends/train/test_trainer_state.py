"""The learning rate, by hand."""

from __future__ import annotations

import pytest

from backends.train.trainer_state import lr_at
from specs.schema.role_section import Optimizer


def rates(total: int, steps: range, **changes: object) -> list[float]:
    optimizer = Optimizer(**{"lr": 1.0, **changes})
    return [lr_at(step, optimizer, total) for step in steps]


def test_warm_up_then_constant() -> None:
    assert rates(10, range(6), warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_falls_to_the_minimum_and_stays() -> None:
    assert rates(6, range(9), warmup_steps=2, schedule="linear", min_lr_ratio=0.2) == pytest.approx(
        [0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2]
    )


def test_cosine_is_half_way_in_the_middle() -> None:
    got = rates(12, range(2, 14), warmup_steps=2, schedule="cosine")
    assert got[0] == 1.0
    assert got[5] == pytest.approx(0.5)
    assert got[10] == pytest.approx(0.0)
    assert got == sorted(got, reverse=True)
