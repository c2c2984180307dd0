"""What autograd keeps, held elsewhere until the backward pass."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from backends.train.activation_offload import ActivationOffload

CPU = torch.device("cpu")
Work = Callable[[Tensor], Tensor]


def with_views(x: Tensor) -> Tensor:
    """Saves one storage several times: whole, transposed, in pieces."""
    y = (x @ x).tanh()
    left, right = y.chunk(2, dim=1)
    return torch.cat([left * right.sin(), right * left], dim=1) @ y.T * y


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


def test_gradients_are_the_same_to_the_bit() -> None:
    x, offload = torch.randn(32, 32), ActivationOffload(CPU, smallest_bytes=0)
    for _ in range(2):  # the second pass finds nothing of the first
        assert torch.equal(gradient(with_views, x), gradient(with_views, x, offload))


def test_a_storage_is_copied_once_however_often_it_is_saved() -> None:
    x, offload = torch.randn(64, 64), ActivationOffload(CPU, smallest_bytes=0)

    def work(x: Tensor) -> Tensor:
        y = x.exp()  # saves y; each product below saves it again, or a view of it
        return (y @ y.T) + (y * y.flip(0))

    gradient(work, x, offload)
    y_and_its_mirror = 2 * x.nbytes
    assert offload.offloaded_bytes == y_and_its_mirror
