"""RMSNorm with a backward pass of its own, for training in fp32 on CPU.

As transformers writes it, autograd keeps three tensors of the row and goes over it some ten times on the way back; here
it is one kept tensor and six passes, the same numbers to rounding (Zhang & Sennrich 2019).

T: tokens, E: hidden size.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

_KNOWN = {"LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm"}  # weight · x / sqrt(mean(x²) + eps)


def use_fast_norms(model: nn.Module) -> None:
    """Give the model's RMSNorms the forward below, where they are of a kind that it computes. Call it once."""
    for module in model.modules():
        if type(module).__name__ in _KNOWN:
            module.forward = MethodType(_forward, module)


def _forward(norm: nn.Module, x: Tensor) -> Tensor:
    if x.device.type != "cpu" or x.dtype != torch.float32:
        known: Any = type(norm)
        stock: Tensor = known.forward(norm, x)
        return stock
    weight: Any = norm.weight
    eps: Any = norm.variance_epsilon
    return rms_norm(x, weight, eps)


def rms_norm(x: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """x [..., E] fp32 → [..., E]."""
    out: Tensor = _RmsNorm.apply(x, weight_E, eps)
    return out


class _RmsNorm(torch.autograd.Function):
    """(x [..., E] fp32, weight [E], eps) → [..., E]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_E: Tensor, eps: float) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        inverse: Tensor = length.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        unit: Tensor = x * inverse
        ctx.save_for_backward(unit, inverse, weight_E)
        out: Tensor = unit * weight_E
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        unit, inverse, weight_E = ctx.saved_tensors
        product_TE = (grad * unit).reshape(-1, grad.shape[-1])  # of queries and keys it comes transposed
        grad_weight_E = product_TE.sum(0) if ctx.needs_input_grad[1] else None
        along = (product_TE @ weight_E).div_(grad.shape[-1]).view(inverse.shape)
        grad_x = (grad * weight_E).addcmul_(unit, along, value=-1).mul_(inverse)
        return grad_x, grad_weight_E, None
