"""torch's fused AdamW (Loshchilov & Hutter 2019) on tensors that a rank steps by itself: matrices decay, the rest does
not.

State exists from the start, so that a trainer that has not stepped yet saves and loads like any other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from specs.schema.role_section import Optimizer

MOMENTS = ("exp_avg", "exp_avg_sq")


def make_adamw(
    matrices: Sequence[nn.Parameter], others: Sequence[nn.Parameter], config: Optimizer
) -> torch.optim.AdamW:
    groups = [
        {"params": list(parameters), "weight_decay": decay}
        for parameters, decay in ((matrices, config.weight_decay), (others, 0.0))
        if parameters
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def make_state(adamw: torch.optim.AdamW, parameters: Iterable[Tensor]) -> None:
    for parameter in parameters:
        step = torch.zeros((), dtype=torch.float32, device=parameter.device)
        zeros = {kind: torch.zeros_like(parameter, requires_grad=False) for kind in MOMENTS}
        adamw.state[parameter] = {"step": step, **zeros}


def set_learning_rate(adamw: torch.optim.AdamW, lr: float) -> None:
    for group in adamw.param_groups:
        group["lr"] = lr


def set_steps(adamw: torch.optim.AdamW, steps: int) -> None:
    """Set how many steps were made: Adam's bias correction depends on it."""
    for state in adamw.state.values():
        state["step"].fill_(steps)
