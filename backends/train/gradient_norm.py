"""The norm of a gradient, without a second gradient beside it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

# Elements that are widened to fp64 at a time: on the CPU what stays in a cache, on a GPU few kernels.
PIECE, GPU_PIECE = 2**20, 2**24


def gradient_norm(gradients: Iterable[Tensor]) -> Tensor:
    """Of all tensors together, a scalar in fp64 on their device. At least one must be given.

    In fp64, for over millions of values the fp32 sum is off in the fourth digit; piece by piece, for widening a whole
    gradient takes twice its memory. All pieces are widened in one place: small results between large ones that come and
    go would keep the allocator from using a place again.
    """
    pieces = [piece for gradient in gradients for piece in _pieces(gradient)]
    like = {"dtype": torch.float64, "device": pieces[0].device}
    wide, norms = torch.empty(max(map(len, pieces)), **like), torch.empty(len(pieces), **like)
    for number, piece in enumerate(pieces):
        torch.linalg.vector_norm(wide[: len(piece)].copy_(piece), out=norms[number])
    return torch.linalg.vector_norm(norms)


def _pieces(gradient: Tensor) -> Iterable[Tensor]:
    return gradient.detach().flatten().split(PIECE if gradient.device.type == "cpu" else GPU_PIECE)
