"""Compute what a step needs: the gradient norm, and torch's fused AdamW (Loshchilov & Hutter 2019) on tensors that a
rank steps by itself. Matrices decay, the rest does not.

State exists from the start, so that a trainer that has not stepped yet saves and loads like any other.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from specs.schema.role_section import Optimizer

MOMENTS = ("exp_avg", "exp_avg_sq")
# Elements that are widened to fp64 at a time: on the CPU what stays in a cache, on a GPU few kernels.
PIECE, GPU_PIECE = 2**20, 2**24


def make_adamw(dims: Iterable[tuple[nn.Parameter, int]], config: Optimizer) -> torch.optim.AdamW:
    """Return the optimizer of parameters, each with the number of its dims in the model: two make a matrix."""
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for parameter, ndim in dims:
        (matrices if ndim >= 2 else others).append(parameter)
    decays = ((matrices, config.weight_decay), (others, 0.0))
    groups = [{"params": parameters, "weight_decay": decay} for parameters, decay in decays if parameters]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def make_state(adamw: torch.optim.AdamW, parameters: Iterable[Tensor]) -> None:
    for parameter in parameters:
        step = torch.zeros((), dtype=torch.float32, device=parameter.device)
        zeros = {kind: torch.zeros_like(parameter, requires_grad=False) for kind in MOMENTS}
        adamw.state[parameter] = {"step": step, **zeros}


def set_learning_rate(adamw: torch.optim.AdamW, lr: float) -> None:
    for group in adamw.param_groups:
        group["lr"] = lr


def set_steps(adamw: torch.optim.Optimizer, steps: int) -> None:
    """Set how many steps were made: Adam's bias correction depends on it. torch counts them for each parameter,
    TransformerEngine's and Apex's FusedAdam for each group, where none yet is no key."""
    for state in adamw.state.values():
        state["step"].fill_(steps)
    if not isinstance(adamw, torch.optim.Adam):
        for group in adamw.param_groups:
            group.pop("step", None)
            if steps:
                group["step"] = steps


def gradient_norm(gradients: Iterable[Tensor]) -> Tensor:
    """Norm over all tensors, a scalar in fp64 on their device. At least one must be given.

    In fp64, for over millions of values the fp32 sum is off in the fourth digit; piece by piece, for widening a whole
    gradient takes twice its memory. All pieces are widened in one place: small results between large ones that come and
    go would keep the allocator from using a place again.
    """
    pieces = [piece for gradient in gradients for piece in _pieces(gradient)]
    device = pieces[0].device
    wide = torch.empty(max(map(len, pieces)), dtype=torch.float64, device=device)
    norms = torch.empty(len(pieces), dtype=torch.float64, device=device)
    for i, piece in enumerate(pieces):
        torch.linalg.vector_norm(wide[: len(piece)].copy_(piece), out=norms[i])
    norm: Tensor = torch.linalg.vector_norm(norms)
    return norm


def _pieces(gradient: Tensor) -> Iterable[Tensor]:
    size = PIECE if gradient.device.type == "cpu" else GPU_PIECE
    pieces: tuple[Tensor, ...] = gradient.detach().flatten().split(size)
    return pieces
