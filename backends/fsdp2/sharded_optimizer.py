"""AdamW on a rank's own rows."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from specs.schema.role_section import Optimizer


class RowsAdamW:
    """torch's fused AdamW (Loshchilov & Hutter 2019) on plain tensors that share memory with the local shards: nothing
    of a step needs another rank. Matrices get weight decay, the rest does not.

    State exists from the start, so that a trainer that has not stepped yet saves and loads like any other.
    """

    def __init__(self, rows: Mapping[str, Tensor], matrices: set[str], config: Optimizer) -> None:
        """`rows`: each learning parameter's local rows, fp32, by name; those of `matrices` decay. A parameter with
        fewer rows than ranks leaves some of them without any."""
        self.parameters = {name: nn.Parameter(local) for name, local in rows.items() if local.numel()}
        groups = []
        for decays, weight_decay in ((True, config.weight_decay), (False, 0.0)):
            chosen = [parameter for name, parameter in self.parameters.items() if (name in matrices) == decays]
            if chosen:
                groups.append({"params": chosen, "weight_decay": weight_decay})
        self.adamw = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)
        for parameter in self.parameters.values():
            step = torch.zeros((), dtype=torch.float32, device=parameter.device)
            moments = {name: torch.zeros_like(parameter.detach()) for name in ("exp_avg", "exp_avg_sq")}
            self.adamw.state[parameter] = {"step": step, **moments}

    def step(self, gradients: Mapping[str, Tensor], lr: float) -> None:
        """`gradients`: by name, of this rank's rows."""
        for group in self.adamw.param_groups:
            group["lr"] = lr
        for name, parameter in self.parameters.items():
            parameter.grad = gradients[name]
        self.adamw.step()
        self.adamw.zero_grad()

    def set_steps(self, steps: int) -> None:
        """How many steps were made: Adam's bias correction depends on it."""
        for moments in self.adamw.state.values():
            moments["step"].fill_(steps)

    def moments(self) -> dict[str, dict[str, Tensor]]:
        """`exp_avg` and `exp_avg_sq` by the parameter's name."""
        return {
            name: {kind: self.adamw.state[parameter][kind] for kind in ("exp_avg", "exp_avg_sq")}
            for name, parameter in self.parameters.items()
        }
