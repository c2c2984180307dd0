"""AdamW on the flat buffers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from backends.ddp.flat_buffers import FlatParameters
from specs.schema.role_section import Optimizer


class FlatAdamW:
    """torch's fused AdamW (Loshchilov & Hutter 2019) on two slices: matrices with weight decay, the rest without.

    State exists from the start, so that a trainer that has not stepped yet saves and loads like any other.
    """

    def __init__(self, flat: FlatParameters, config: Optimizer) -> None:
        assert flat.master_P is not None
        assert flat.grad_P is not None
        self.flat = flat
        self.exp_avg_P = torch.zeros_like(flat.master_P)
        self.exp_avg_sq_P = torch.zeros_like(flat.master_P)
        groups = []
        for span, decay in ((slice(0, flat.num_decayed), config.weight_decay), (slice(flat.num_decayed, None), 0.0)):
            parameter = nn.Parameter(flat.master_P[span])
            parameter.grad = flat.grad_P[span]
            if parameter.numel():
                groups.append({"params": [parameter], "weight_decay": decay, "span": span})
        self.adamw = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)
        for group in self.adamw.param_groups:
            parameter = group["params"][0]
            step = torch.zeros((), dtype=torch.float32, device=parameter.device)
            span = group["span"]
            moments = {"exp_avg": self.exp_avg_P[span], "exp_avg_sq": self.exp_avg_sq_P[span]}
            self.adamw.state[parameter] = {"step": step, **moments}

    def step(self, lr: float) -> None:
        for group in self.adamw.param_groups:
            group["lr"] = lr
        self.adamw.step()

    def set_steps(self, steps: int) -> None:
        """How many steps were made: Adam's bias correction depends on it."""
        for moments in self.adamw.state.values():
            moments["step"].fill_(steps)

    def tensors(self) -> list[Tensor]:
        return [self.exp_avg_P, self.exp_avg_sq_P]

    def named_state(self) -> dict[str, Tensor]:
        """Moments as views, by parameter name."""
        return {
            f"{segment.name}.{kind}": segment.view(moment_P)
            for segment in self.flat.segments
            for kind, moment_P in (("exp_avg", self.exp_avg_P), ("exp_avg_sq", self.exp_avg_sq_P))
        }
