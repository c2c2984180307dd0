"""Large fp32 matrix products on CPU by oneDNN, where MKL is the slower of the two.

torch multiplies fp32 matrices with MKL, which uses AVX-512 on Intel's processors alone: on AMD's of the last years
oneDNN, which torch brings along, takes half the time. torch chooses oneDNN where a lower precision is *allowed*. A
processor without matrix instructions (AMX) has no such precision, and computes in fp32 all the same, which is proven
before it is relied on.
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
LEAST = 2**24
"""Multiplications. oneDNN compiles for each shape it meets, in about half a millisecond; layers share shapes."""


def use_fast_linears(model: nn.Module) -> None:
    """Give the model's linear layers the forward below. Those that have one of their own already keep it."""
    for module in model.modules() if onednn_is_faster() else ():
        if type(module) is nn.Linear and "forward" not in vars(module):
            module.forward = MethodType(_forward, module)  # type: ignore[method-assign]


def _forward(layer: nn.Linear, x: Tensor) -> Tensor:
    return linear(x, layer.weight, layer.bias)


def linear(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """x [..., K] → [..., N], as `F.linear` computes it."""
    if not _is_large(x, weight_NK):
        return F.linear(x, weight_NK, bias_N)
    if torch.is_grad_enabled():
        out: Tensor = _Linear.apply(x, weight_NK, bias_N)
        return out
    with _by_onednn():
        return F.linear(x, weight_NK, bias_N)


def fast_matmuls(x: Tensor, weight_NK: Tensor) -> AbstractContextManager[object]:
    """Choose for the products of a linear layer, forward and backward, while it is open."""
    return _by_onednn() if _is_large(x, weight_NK) else nullcontext()


def _is_large(x: Tensor, weight_NK: Tensor) -> bool:
    if x.device.type != "cpu" or x.dtype != torch.float32 or weight_NK.dtype != torch.float32:
        return False
    return x.numel() * len(weight_NK) >= LEAST and onednn_is_faster()


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


class _Linear(torch.autograd.Function):
    """(x [..., K], weight [N, K], bias [N] or None) → [..., N]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight_NK)
        with _by_onednn():
            return F.linear(x, weight_NK, bias_N)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight_NK = ctx.saved_tensors
        by_x, by_weight, by_bias = ctx.needs_input_grad
        grad_TN = grad.flatten(0, -2)
        with _by_onednn():
            grad_x = (grad_TN @ weight_NK).view_as(x) if by_x else None
            grad_weight = grad_TN.T @ x.flatten(0, -2) if by_weight else None
        return grad_x, grad_weight, grad_TN.sum(0) if by_bias else None
