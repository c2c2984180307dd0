"""The norm of a gradient: its value, against a slow sum, and what it takes beside the gradient."""

from __future__ import annotations

import math

import pytest
import torch
from peak_memory import MIB, grown_bytes

from backends.train import adamw as module
from backends.train.adamw import PIECE, gradient_norm


def test_it_is_the_root_of_the_exact_sum_of_squares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE", 100)
    torch.manual_seed(0)
    # Several tensors, one of more than a piece and one of a rank that holds no rows; magnitudes far apart.
    tensors = [torch.randn(1007) * 1e-4, torch.randn(33, 5).t() * 1e4, torch.zeros(0, 9), torch.tensor([1e-30])]
    wanted = math.sqrt(math.fsum(value * value for tensor in tensors for value in tensor.flatten().tolist()))
    assert float(gradient_norm(tensors)) == pytest.approx(wanted, rel=1e-14)
    assert gradient_norm(tensors).dtype == torch.float64


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_shows_wherever_it_is(bad: float) -> None:
    gradient = torch.ones(2 * PIECE)
    gradient[-1] = bad
    assert not math.isfinite(gradient_norm([torch.ones(3), gradient]))


def test_it_takes_no_second_gradient() -> None:
    gradient = torch.ones(16 * PIECE)  # 64 MiB, and 128 in fp64
    gradient_norm([gradient[:PIECE]])
    assert grown_bytes(lambda: gradient_norm([gradient])) < 24 * MIB
    assert float(gradient_norm([gradient])) == 4 * math.sqrt(PIECE)
