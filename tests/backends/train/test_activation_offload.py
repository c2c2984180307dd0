"""What autograd keeps, held elsewhere until the backward pass."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from backends.train.activation_offload import ActivationOffload

CPU = torch.device("cpu")
Work = Callable[[Tensor], Tensor]


def gradient(work: Work, x: Tensor, offload: ActivationOffload | None = None) -> Tensor:
    leaf = x.clone().requires_grad_()
    if offload is None:
        out = work(leaf)
    else:
        with offload.saving():
            out = work(leaf)
    out.square().sum().backward()
    assert leaf.grad is not None
    return leaf.grad


def test_a_storage_is_copied_once_however_often_it_is_saved() -> None:
    """Gradients are the same to the bit, in a second pass too: it finds nothing of the first."""
    x = torch.randn(64, 64)

    def work(x: Tensor) -> Tensor:
        y = x.exp()  # saves y; each product below saves it again, or a view of it
        return (y @ y.T) + (y * y.flip(0))

    offload, y_and_its_mirror = ActivationOffload(CPU, smallest_bytes=0), 2 * x.nbytes
    for _ in range(2):
        assert torch.equal(gradient(work, x), gradient(work, x, offload))
        assert offload.offloaded_bytes == y_and_its_mirror
