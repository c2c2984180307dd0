"""Large fp32 matrix products on CPU by oneDNN, where MKL is the slower of the two.

torch multiplies fp32 matrices with MKL, which uses AVX-512 on Intel's processors alone: on AMD's of the last years
oneDNN, which torch brings along, takes half the time. torch chooses oneDNN where a lower precision is *allowed*. A
processor without matrix instructions (AMX) has no such precision, and computes in fp32 all the same, which is proven
before it is relied on.

oneDNN compiles for every shape that it meets, in a quarter of a millisecond and more, and keeps half a MiB of it. Rows
of tokens have ever new lengths: oneDNN gets a round number of them, and MKL the rest.

T: tokens, K, N: width of the input and of the output.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

MKLDNN: Any = torch.backends.mkldnn  # oneDNN by its old name
LEAST, LEAST_ONCE = 2**23, 2**27
"""Multiplications that pay, of a shape that comes again and of one that may not."""


def use_fast_linears(model: nn.Module, device: str) -> None:
    """Give the linear layers of a model for this device the forward below, but for those that have one of their own."""
    for module in model.modules() if device == "cpu" and onednn_is_faster() else ():
        if type(module) is nn.Linear and "forward" not in vars(module):
            module.forward = MethodType(_forward, module)  # type: ignore[method-assign]


def _forward(layer: nn.Linear, x: Tensor) -> Tensor:
    return linear(x, layer.weight, layer.bias)


def linear(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """x [..., K] → [..., N], as `F.linear` computes it."""
    if not _pays(x, weight_NK, LEAST):
        return F.linear(x, weight_NK, bias_N)
    if torch.is_grad_enabled():
        out: Tensor = _Linear.apply(x, weight_NK, bias_N)
        return out
    return _multiply(x, weight_NK.T, bias_N)


def add_linear(sum_TN: Tensor, x_TK: Tensor, layer: nn.Linear) -> Tensor:
    """Return sum + layer(x), without gradients; in one call where the layer has no bias."""
    if layer.bias is not None:
        return sum_TN + linear(x_TK, layer.weight, layer.bias)
    if _pays(x_TK, layer.weight, LEAST):
        return _multiply(x_TK, layer.weight.T, sum_TN)
    return torch.addmm(sum_TN, x_TK, layer.weight.T)


def fast_matmuls(x_TK: Tensor, weight_NK: Tensor) -> AbstractContextManager[object]:
    """Choose for the products of a linear layer, forward and backward, while it is open."""
    return _by_onednn() if _pays(x_TK, weight_NK, LEAST_ONCE) else nullcontext()


def _pays(x: Tensor, weight_NK: Tensor, least: int) -> bool:
    if x.device.type != "cpu" or x.dtype != torch.float32 or weight_NK.dtype != torch.float32 or x.ndim == 1:
        return False
    return x.numel() * len(weight_NK) >= least and onednn_is_faster()


@cache
def onednn_is_faster() -> bool:
    """Return whether this processor has AVX-512 that MKL does not use, and oneDNN's products are in fp32."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not torch.backends.mkl.is_available():
        return False
    try:
        is_intel = "GenuineIntel" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return not is_intel and MKLDNN.is_available() and _is_exact()


def _is_exact() -> bool:
    """Return whether oneDNN keeps the last bit of an fp32 number."""
    x = torch.full((64, 64), 1 + 2**-23)
    with _by_onednn():
        return torch.equal(x @ torch.eye(64), x)


@contextmanager
def _by_onednn() -> Iterator[None]:
    """Let torch multiply fp32 matrices with oneDNN. Attention stays outside: its small products take three times as
    long there."""
    MKLDNN.matmul.fp32_precision = "bf16"  # allows it; what it is here, `_is_exact` says
    try:
        yield
    finally:
        MKLDNN.matmul.fp32_precision = "none"


def _round(rows: int) -> int:
    """Return how many of them oneDNN gets: all but a sixteenth at most. The few shapes that are left come again."""
    return rows - rows % (1 << max(4, rows.bit_length() - 5))


def _multiply(x: Tensor, weight_KN: Tensor, added: Tensor | None) -> Tensor:
    """x [..., K] → [..., N], and what is added to it, [N] or of its shape."""
    out = x.new_empty(*x.shape[:-1], weight_KN.shape[1])  # no view: the model may change it in place
    x_TK, out_TN = x.flatten(0, -2), out.flatten(0, -2)
    added_TN = None if added is None else added.expand_as(out_TN)
    first = _round(len(x_TK))
    with _by_onednn():
        _multiply_rows(slice(first), x_TK, weight_KN, added_TN, out_TN)
    if first < len(x_TK):
        _multiply_rows(slice(first, None), x_TK, weight_KN, added_TN, out_TN)
    return out


def _multiply_rows(rows: slice, x_TK: Tensor, weight_KN: Tensor, added_TN: Tensor | None, out_TN: Tensor) -> None:
    if added_TN is None:
        torch.mm(x_TK[rows], weight_KN, out=out_TN[rows])
    else:
        torch.addmm(added_TN[rows], x_TK[rows], weight_KN, out=out_TN[rows])


def _sum_over_tokens(grad_TN: Tensor, x_TK: Tensor) -> Tensor:
    """Return gradᵀ x, [N, K]."""
    first = _round(len(x_TK))
    with _by_onednn():
        sum_NK = grad_TN[:first].T @ x_TK[:first]
    return sum_NK.addmm_(grad_TN[first:].T, x_TK[first:]) if first < len(x_TK) else sum_NK


class _Linear(torch.autograd.Function):
    """(x [..., K], weight [N, K], bias [N] or None) → [..., N]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight_NK)
        return _multiply(x, weight_NK.T, bias_N)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight_NK = ctx.saved_tensors
        by_x, by_weight, by_bias = ctx.needs_input_grad
        grad_TN = grad.flatten(0, -2)
        return (
            _multiply(grad, weight_NK, None) if by_x else None,
            _sum_over_tokens(grad_TN, x.flatten(0, -2)) if by_weight else None,
            grad_TN.sum(0) if by_bias else None,
        )
