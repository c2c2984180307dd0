"""What modules of transformers' models compute, found by calling them, and the same in plain torch.

A module counts as a norm, a gated MLP or a rotation because it gives the formula's numbers, whatever its name is: a
kernel then takes the formula's place. What gives other numbers stays as it is. Only the module's own code is called, on
small tensors of the CPU: its weights may be on meta, or cut.

T: tokens, E: width, H: heads, D: head size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import signature
from types import FunctionType
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

ROTATION = "apply_rotary_pos_emb"  # what transformers' attention layers call
_WIDTH, _ROWS = 32, 64


@dataclass(frozen=True)
class NormForm:
    """An RMSNorm: x / rms(x) · (offset + weight), computed in fp32. `rounds_first`: x / rms(x) is rounded to x's dtype
    before it meets the weight (Llama); else the product is (Gemma)."""

    offset: float
    rounds_first: bool


Gate = Literal["silu", "gelu"]
"""Activation of a gated MLP: act(gate) · up. "gelu" is its tanh approximation."""
NORM_FORMS = (NormForm(0.0, True), NormForm(0.0, False), NormForm(1.0, False))
ACTIVATIONS: Mapping[Gate, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": lambda x: functional.gelu(x, approximate="tanh"),
}


class Kernels(Protocol):
    """The formulas, by whatever computes them."""

    def rms_norm(self, x: Tensor, weight_E: Tensor, eps: float, form: NormForm) -> Tensor:
        """x [..., E] → [..., E], of x's dtype, which is the weight's."""

    def gated(self, gate: Tensor, up: Tensor, activation: Gate) -> Tensor:
        """Both [..., E] → [..., E]. May write into both in the backward pass."""

    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """q and k [1, H, T, D], cos and sin [1, T, D] → rotated q and k. May write into both."""


class TorchKernels:
    """Plain torch."""

    def rms_norm(self, x: Tensor, weight_E: Tensor, eps: float, form: NormForm) -> Tensor:
        wide = x.float()
        unit = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        if form.rounds_first:
            return (form.offset + weight_E) * unit.to(x.dtype)
        return (unit * (form.offset + weight_E.float())).to(x.dtype)

    def gated(self, gate: Tensor, up: Tensor, activation: Gate) -> Tensor:
        return ACTIVATIONS[activation](gate) * up

    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        return q * cos + _half_turned(q) * sin, k * cos + _half_turned(k) * sin


TORCH = TorchKernels()


def _half_turned(x: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return torch.cat((-right, left), -1)


# ── what a module computes ────────────────────────────────────────────────────────────────────────


def norm_form(module: nn.Module) -> NormForm | None:
    """Which RMSNorm this is."""
    if not _is_of(module, parameters={"weight"}, children=set()) or eps_of(module) is None:
        return None
    draw = torch.Generator().manual_seed(0)
    x, weight_E = torch.randn(_ROWS, _WIDTH, generator=draw) * 3, torch.rand(_WIDTH, generator=draw) + 0.5
    for form in NORM_FORMS:
        if all(_gives_norm(module, x.to(dtype), weight_E.to(dtype), form) for dtype in (torch.float32, torch.bfloat16)):
            return form
    return None


def _gives_norm(module: nn.Module, x: Tensor, weight_E: Tensor, form: NormForm) -> bool:
    """In fp32 to rounding; in bf16 to the bit, because there the forms differ in nothing else."""
    eps = eps_of(module)
    assert eps is not None
    ours, theirs = TORCH.rms_norm(x, weight_E, eps, form), _called(module, x, weight=weight_E)
    if x.dtype == torch.float32:
        return _equal(ours, theirs)
    return theirs is not None and theirs.dtype == ours.dtype and torch.equal(ours, theirs)


def eps_of(module: nn.Module) -> float | None:
    found = next((vars(module)[name] for name in ("variance_epsilon", "eps") if name in vars(module)), None)
    return found if isinstance(found, float) else None


def gate_of(module: nn.Module) -> Gate | None:
    """The activation of a module that is down(act(gate(x)) · up(x))."""
    if not _is_of(module, parameters=set(), children={"gate_proj", "up_proj", "down_proj"}):
        return None
    x = torch.randn(_ROWS, _WIDTH, generator=torch.Generator().manual_seed(0)) * 2
    parts: Mapping[str, Callable[[Tensor], Tensor]] = {
        "gate_proj": lambda x: x.flip(-1) + 0.5,
        "up_proj": lambda x: 0.3 - x,
        "down_proj": lambda x: 2 * x + 1,
    }
    theirs = _called(module, x, **parts)
    for name, activation in ACTIVATIONS.items():
        if _equal(parts["down_proj"](activation(parts["gate_proj"](x)) * parts["up_proj"](x)), theirs):
            return name
    return None


def rotation_of(module: nn.Module) -> Callable[..., Any] | None:
    """The function that turns queries and keys in this attention layer, where it is the usual one."""
    forward = type(module).forward
    if not isinstance(forward, FunctionType) or hasattr(forward, "__wrapped__") or "forward" in vars(module):
        return None
    rotate = forward.__globals__.get(ROTATION)
    if ROTATION not in forward.__code__.co_names or not callable(rotate):
        return None
    draw = torch.Generator().manual_seed(0)
    q, k = torch.randn(1, 4, 5, 8, generator=draw), torch.randn(1, 2, 5, 8, generator=draw)
    angles = torch.randn(1, 5, 4, generator=draw).repeat(1, 1, 2)
    try:
        theirs = rotate(q, k, angles.cos(), angles.sin())
    except Exception:  # whatever it is, it is not the usual one
        return None
    ours = TORCH.rotate(q, k, angles.cos(), angles.sin())
    return rotate if all(_equal(*pair) for pair in zip(ours, theirs, strict=True)) else None


def _is_of(module: nn.Module, parameters: set[str], children: set[str]) -> bool:
    """Whether it has these parameters of its own and these children among others, takes one tensor, and computes by
    its class's code."""
    own = {name for name, parameter in module._parameters.items() if parameter is not None}
    if own != parameters or not children <= module._modules.keys() or "forward" in vars(module):
        return False
    return len(signature(type(module).forward).parameters) == 2


def _called(module: nn.Module, x: Tensor, **attributes: Any) -> Tensor | None:
    """What the module's code gives with other parts in the place of its own; None where it does not run so."""
    part = object.__new__(type(module))
    part.__dict__.update(module.__dict__, **attributes)  # found before parameters and children of that name
    try:
        with torch.no_grad():
            found = type(module).forward(part, x)
    except Exception:  # code of any kind
        return None
    return found if isinstance(found, Tensor) else None


def _equal(ours: Tensor, theirs: Tensor | None) -> bool:
    return theirs is not None and ours.shape == theirs.shape and torch.allclose(ours, theirs, rtol=1e-6, atol=1e-6)
