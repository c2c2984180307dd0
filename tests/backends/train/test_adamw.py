"""The norm of a gradient: its value, against a slow sum, and what it takes beside the gradient."""

from __future__ import annotations

import math

import pytest
import torch
from peak_memory import MIB, grown_bytes

from backends.train import adamw as module
from backends.train.adamw import MOMENTS, PIECE, gradient_norm, set_steps


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


class GroupCounts(torch.optim.Optimizer):
    """Adam that counts steps as the fused ones of TransformerEngine and Apex do: for a group, from 1 where none did."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 1.0, "betas": (0.9, 0.95)})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            first, second = (1 - beta ** group["step"] for beta in group["betas"])
            for parameter in group["params"]:
                mean, square = (self.state[parameter][kind] for kind in MOMENTS)
                mean.lerp_(parameter.grad, 1 - group["betas"][0])
                square.lerp_(parameter.grad.square(), 1 - group["betas"][1])
                parameter -= group["lr"] * (mean / first) / ((square / second).sqrt() + 1e-8)


def test_a_resumed_optimizer_that_counts_by_group_goes_on_where_it_was() -> None:
    """Counted from one again over old moments, the next update would be 2.2 times as large."""

    def made() -> tuple[torch.nn.Parameter, GroupCounts]:
        parameter = torch.nn.Parameter(torch.zeros(4))
        parameter.grad = torch.ones(4)
        optimizer = GroupCounts([parameter])
        optimizer.state[parameter] = {"step": torch.zeros(()), **{kind: torch.zeros(4) for kind in MOMENTS}}
        set_steps(optimizer, 0)
        return parameter, optimizer

    (one, straight), (other, resumed) = made(), made()
    for _ in range(50):
        straight.step()
    for kind in MOMENTS:
        resumed.state[other][kind].copy_(straight.state[one][kind])
    set_steps(resumed, 50)
    other.data.copy_(one.data)
    straight.step()
    resumed.step()
    assert torch.equal(one, other)
