"""The clipped value loss against a slow loop, hand-computed numbers and its numpy twin: values and gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from backends.fake.fake_losses import fake_value_loss
from backends.train.score_head import ValueColumns, value_loss
from specs.schema.algorithms.algorithm_tables import ValueLoss


def found(value_N, old_N, return_N, weight_N, loss: ValueLoss) -> tuple[float, list[float], dict[str, float]]:
    """Loss, its gradient by the values, and the sums."""
    value_N, old_N, return_N, weight_N = (
        torch.tensor(x, dtype=torch.float64) for x in (value_N, old_N, return_N, weight_N)
    )
    value_N.requires_grad_()
    total, sums, maxima = value_loss(value_N, ValueColumns(weight_N, old_N, return_N), loss)
    total.backward()
    assert maxima.numel() == 0
    return total.item(), value_N.grad.tolist(), dict(zip(loss.summed(), sums.tolist(), strict=True))


def test_numbers_worked_out_by_hand() -> None:
    """c = 0.5, V_old = 1. Token by token:

    V = 1.2, R = 3: inside the band, ½(1.8)² = 1.62, slope -1.8.
    V = 2.0, R = 3: clipped to 1.5, ½(1.5)² = 1.125 > ½(1)²: it has come closer than the band allows, slope 0.
    V = 2.0, R = 0: clipped to 1.5, ½(1.5)² = 1.125 < ½(2)² = 2: it went the wrong way, slope 2.
    V = 0.0, R = 0: clipped to 0.5, ½(0.5)² = 0.125 > 0: slope 0.
    """
    weights = [0.25, 0.5, 0.125, 2.0]
    total, slopes, sums = found([1.2, 2, 2, 0], [1.0] * 4, [3.0, 3, 0, 0], weights, ValueLoss(value_clip=0.5))
    assert total == pytest.approx(0.25 * 1.62 + 0.5 * 1.125 + 0.125 * 2 + 2 * 0.125)
    assert slopes == pytest.approx([-1.8 * 0.25, 0, 2 * 0.125, 0])
    assert sums == pytest.approx({"loss": total, "clipped": 2, "value": 5.2, "return": 6})


def slow(value: float, old: float, ret: float, clip: float | None) -> float:
    plain = (value - ret) ** 2
    return 0.5 * (plain if clip is None else max(plain, (old + min(max(value - old, -clip), clip) - ret) ** 2))


@pytest.mark.parametrize("clip", [None, 0.2, 1.0])
def test_against_a_loop_and_finite_differences(clip: float | None) -> None:
    rng = np.random.default_rng(1)
    value, old, ret = (rng.normal(size=200) for _ in range(3))
    weight, loss = rng.uniform(size=200), ValueLoss(value_clip=clip)
    total, slopes, _ = found(value, old, ret, weight, loss)
    assert total == pytest.approx(sum(w * slow(*row, clip) for w, *row in zip(weight, value, old, ret, strict=True)))
    for i, (v, o, r) in enumerate(zip(value, old, ret, strict=True)):
        step = 1e-6
        numeric = weight[i] * (slow(v + step, o, r, clip) - slow(v - step, o, r, clip)) / (2 * step)
        assert slopes[i] == pytest.approx(numeric, abs=1e-6)


def test_a_value_within_the_band_is_not_clipped() -> None:
    """In fp32 V_old + (V - V_old) is often not V to the last bit: of 1000 tokens 25 counted as clipped."""
    rng = np.random.default_rng(3)
    value_N, old_N, return_N, weight_N = (
        torch.from_numpy((rng.normal(size=1000) * size).astype(np.float32)) for size in (0.01, 0.04, 1, 1)
    )
    assert (value_N - old_N).abs().max() < 0.2
    loss = ValueLoss(value_clip=0.2)
    _, sums, _ = value_loss(value_N, ValueColumns(weight_N, old_N, return_N), loss)
    twin = fake_value_loss(value_N.numpy(), weight_N.numpy(), old_N.numpy(), return_N.numpy(), loss)
    assert sums[loss.summed().index("clipped")] == twin.sums["clipped"] == 0
    assert (twin.by_value_N != 0).all()


@pytest.mark.parametrize("clip", [None, 0.3])
def test_its_numpy_twin(clip: float | None) -> None:
    rng = np.random.default_rng(2)
    columns, loss = [rng.normal(size=100) for _ in range(4)], ValueLoss(value_clip=clip)
    value, old, ret, weight = columns
    _, slopes, sums = found(value, old, ret, weight, loss)
    twin = fake_value_loss(value, weight, old, ret, loss)
    assert twin.sums == pytest.approx(sums)
    np.testing.assert_allclose(twin.by_value_N, slopes, atol=1e-12)
