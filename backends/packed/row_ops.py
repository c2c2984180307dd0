"""Rows of packed tensors, taken or copied, with backward passes that are copies and ordered sums.

Suffixes: T tokens of the row, P rows after padding, N copies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

Put = Callable[[NDArray[Any]], Tensor]  # an array as a tensor on the device


def take_rows(x_P: Tensor, rows_T: Tensor) -> Tensor:
    """[P, …] → [T, …], rows `rows_T`, each at most once (which makes the backward pass a copy instead of a sum)."""
    out: Tensor = _TakeRows.apply(x_P, rows_T)
    return out


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_P: Tensor, rows_T: Tensor) -> Tensor:
        ctx.save_for_backward(rows_T)
        ctx.rows = x_P.shape[0]
        return x_P.index_select(0, rows_T)

    @staticmethod
    def backward(ctx: Any, grad_T: Tensor) -> tuple[Tensor, None]:
        (rows_T,) = ctx.saved_tensors
        grad_P = grad_T.new_zeros(ctx.rows, *grad_T.shape[1:])
        return grad_P.index_copy_(0, rows_T, grad_T), None


class RowCopies:
    """Which of `rows` rows to copy, any number of times each, and for the backward pass where the copies of each are.

    Copies where `real` is False take no part in the backward pass: their gradient must be zero. `put` brings arrays to
    the device.
    """

    def __init__(
        self,
        index_N: NDArray[np.int64],
        rows: int,
        put: Put = torch.from_numpy,
        real: NDArray[np.bool_] | None = None,
    ) -> None:
        places = np.arange(len(index_N)) if real is None else np.flatnonzero(real)
        source = index_N[places]
        counts = np.bincount(source, minlength=rows)
        self.index_N = put(index_N)
        self.places = put(places[np.argsort(source, kind="stable")])
        self.offset_T = put(np.cumsum(counts) - counts)


def copy_rows(x_T: Tensor, copies: RowCopies) -> Tensor:
    """[T, …] → [N, …]; the gradient of a row is the sum over its copies."""
    out: Tensor = _CopyRows.apply(x_T, copies)
    return out


class _CopyRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_T: Tensor, copies: RowCopies) -> Tensor:
        ctx.copies = copies
        return x_T.index_select(0, copies.index_N)

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor, None]:
        # A sum of gathered rows, in a fixed order; index_add_ is slower on CPU for narrow rows and not ordered on CUDA.
        copies: RowCopies = ctx.copies
        if not len(copies.places):
            return grad_N.new_zeros(len(copies.offset_T), *grad_N.shape[1:]), None
        flat_T = F.embedding_bag(copies.places, grad_N.flatten(1), copies.offset_T, mode="sum")
        return flat_T.unflatten(1, grad_N.shape[1:]), None
