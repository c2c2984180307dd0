"""Which kernels a model's modules compute with: chosen when the model is built, proven on its device, read back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from backends.train.kernels.liger_kernels import LigerKernels
from backends.train.kernels.module_formulas import (
    ROTATION,
    TORCH,
    Gate,
    Kernels,
    NormForm,
    eps_of,
    gate_of,
    norm_form,
    rotation_of,
)
from backends.train.rms_norm import use_fast_norms
from specs.errors import ModelError
from specs.packages import installed_here
from specs.schema.engines.kernel_choice import PACKAGES, Asked, KernelFacts, choose_kernels

Form = NormForm | Gate | None
Replacement = Callable[[Kernels], Any]
_GAPS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # of the largest number


@dataclass(frozen=True)
class Replaceable:
    """A module whose formula a kernel may compute. `form`: which one, None for a rotation."""

    module: nn.Module
    kind: str  # "RMSNorm", "gated MLP", "rotation"
    form: Form
    forward: Replacement  # what its forward becomes with these kernels


class HeldKernels:
    """What a model's modules compute with: `name` ("torch": their own code), and how many of each kind a kernel."""

    def __init__(self, name: str, replaced: Mapping[str, int], forms: frozenset[Form], kernels: Kernels | None) -> None:
        self.name, self.replaced = name, replaced
        self._forms, self._kernels = forms, kernels

    def prove(self, device: torch.device, dtype: torch.dtype) -> None:
        """Each formula that kernels compute here must give the numbers of plain torch on this device, in values and
        gradients. Raises ModelError."""
        if self._kernels is None:
            return
        for form in sorted(self._forms, key=repr):
            gap = _gap(partial(_trial, form=form, device=device, dtype=dtype), self._kernels)
            if not gap < _GAPS[dtype]:
                what = f"{form if form is not None else 'rotary positions'} in {dtype}".replace("torch.", "")
                raise ModelError(
                    f"the kernels {self.name} give other numbers than torch for {what} (relative gap {gap:.2g})",
                    hint='write kernels = "torch", and report the versions of liger-kernel and triton',
                )


def hold_kernels(model: PreTrainedModel, asked: Asked, device: str) -> HeldKernels:
    """Let the modules of a model compute with the kernels that were asked for. The engine proves them when its device
    computes (`HeldKernels.prove`). Raises ModelError where `liger` cannot be had."""
    on_gpu = device != "cpu"
    choice = choose_kernels(asked, KernelFacts("cuda" if on_gpu else "cpu", versions=installed_here(PACKAGES)))
    if choice.problem:
        raise ModelError(f"kernels {asked}: {choice.problem}", hint=choice.hint)
    found = [*replaceable(model)] if choice.kernels == "liger" else []
    if choice.kernels == "liger" and not found and asked == "liger":
        hint = 'write kernels = "torch" or "auto"'
        raise ModelError(f"{type(model).__name__} has no module that kernels of liger-kernel compute", hint=hint)
    if not found:
        use_fast_norms(model)
        return HeldKernels("torch", {}, frozenset(), None)
    return install("liger", found, _OnFirstUse())


def install(name: str, found: list[Replaceable], kernels: Kernels) -> HeldKernels:
    """Let these modules compute with `kernels`."""
    for one in found:
        one.module.forward = MethodType(one.forward(kernels), one.module)
    counts = Counter(one.kind for one in found)
    return HeldKernels(name, dict(counts), frozenset(one.form for one in found), kernels)


class _OnFirstUse:
    """Liger's kernels, imported when the first is called: a look at what would be built calls none."""

    def __init__(self) -> None:
        self._kernels: LigerKernels | None = None

    def __getattr__(self, name: str) -> Any:
        self._kernels = self._kernels or LigerKernels()
        return getattr(self._kernels, name)


# ── modules ───────────────────────────────────────────────────────────────────────────────────────


def replaceable(model: nn.Module) -> Iterator[Replaceable]:
    for module in model.modules():
        if (form := norm_form(module)) is not None:
            yield Replaceable(module, "RMSNorm", form, partial(_norm, form=form))
        elif (gate := gate_of(module)) is not None:
            yield Replaceable(module, "gated MLP", gate, partial(_gated, activation=gate))
        elif (stock := rotation_of(module)) is not None:
            yield Replaceable(module, "rotation", None, partial(_rotating, stock, type(module).forward))


def _norm(kernels: Kernels, form: NormForm) -> Any:
    def forward(norm: Any, x: Tensor) -> Tensor:
        if x.dtype != norm.weight.dtype:  # stock code then gives another dtype than x's
            stock: Tensor = type(norm).forward(norm, x)
            return stock
        return kernels.rms_norm(x, norm.weight, eps_of(norm) or 0.0, form)

    return forward


def _gated(kernels: Kernels, activation: Gate) -> Any:
    def forward(mlp: Any, x: Tensor) -> Tensor:
        out: Tensor = mlp.down_proj(kernels.gated(mlp.gate_proj(x), mlp.up_proj(x), activation))
        return out

    return forward


def _rotating(stock: Callable[..., Any], forward: Any, kernels: Kernels) -> Any:
    """The layer's own code, which finds another function under the name of the rotation: for this layer alone."""

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *more: Any, **others: Any) -> Any:
        if more or others or cos.shape[-1] != q.shape[-1]:  # another layout, or a part of each head
            return stock(q, k, cos, sin, *more, **others)
        return kernels.rotate(q, k, cos, sin)

    names = {**forward.__globals__, ROTATION: rotate}
    found = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    found.__kwdefaults__ = forward.__kwdefaults__
    return found


# ── proof ─────────────────────────────────────────────────────────────────────────────────────────


def _trial(kernels: Kernels, form: Form, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """Results, and gradients of all that went in."""
    draw = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw).to(device, dtype).requires_grad_()

    if isinstance(form, NormForm):
        given = [drawn(1, 48, 128), drawn(128)]
        results = [kernels.rms_norm(given[0], given[1], 1e-6, form)]
    elif form is not None:
        given = [drawn(1, 48, 128), drawn(1, 48, 128)]
        results = [kernels.gated(given[0] * 1, given[1] * 1, form)]
    else:
        given = [drawn(1, 4, 48, 64), drawn(1, 2, 48, 64)]
        angles = torch.randn(1, 48, 32, generator=draw).repeat(1, 1, 2).to(device)
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        results = [*kernels.rotate(given[0] * 1, given[1] * 1, cos, sin)]
    upstream = [drawn(*result.shape).detach() for result in results]
    torch.autograd.backward(results, upstream)
    return [*(result.detach() for result in results), *(one.grad for one in given if one.grad is not None)]


def _gap(trial: Callable[[Kernels], list[Tensor]], kernels: Kernels) -> float:
    pairs = zip(trial(kernels), trial(TORCH), strict=True)
    return max(float((ours - theirs).abs().max() / theirs.abs().max()) for ours, theirs in pairs)
