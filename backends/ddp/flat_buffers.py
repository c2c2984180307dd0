"""All parameters of a model as views of one flat buffer, all gradients as views of another, and AdamW on them.

One buffer makes one all-reduce, one norm and one optimizer call of a whole step, whatever the model's layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from backends.hf.hf_model import cast_parameters
from backends.train.adamw import make_adamw, set_learning_rate
from specs.schema.engines.ddp_table import FLAT_ALIGN
from specs.schema.role_section import Optimizer

# Every parameter starts on a cache line (FLAT_ALIGN fp32 values); the gaps stay zero.


@dataclass(frozen=True)
class FlatSegment:
    """Where a parameter lies in the flat buffers."""

    name: str
    parameter: nn.Parameter
    start: int

    def view(self, flat: Tensor) -> Tensor:
        return flat[self.start : self.start + self.parameter.numel()].view(self.parameter.shape)


class FlatParameters:
    """Flat buffers of a model. P: elements of all trainable parameters, gaps included.

    `compute_P` holds what the forward pass reads. A model that learns also has `master_P` (fp32; the same tensor as
    `compute_P` when that is fp32) and `grad_P` (fp32). Matrices come first, so that weight decay is a slice: they
    are `[:num_decayed]`.
    """

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype, *, learns: bool) -> None:
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad or not learns]
        ordered = [item for item in named if item[1].ndim >= 2] + [item for item in named if item[1].ndim < 2]
        self.segments: list[FlatSegment] = []
        size = self.num_decayed = 0
        for name, parameter in ordered:
            self.segments.append(FlatSegment(name, parameter, size))
            size += -(-parameter.numel() // FLAT_ALIGN) * FLAT_ALIGN
            if parameter.ndim >= 2:
                self.num_decayed = size
        device = next(model.parameters()).device
        self.compute_P = torch.empty(size, dtype=dtype, device=device)
        self.master_P: Tensor | None = None
        self.grad_P: Tensor | None = None
        if learns:
            self.master_P = self.compute_P if dtype == torch.float32 else torch.empty(size, device=device)
            self.grad_P = torch.zeros(size, device=device)
        source_P = self.compute_P if self.master_P is None else self.master_P
        stops = [*(segment.start for segment in self.segments[1:]), size]
        for segment, stop in zip(self.segments, stops, strict=True):
            self.source(segment).copy_(segment.parameter.data)
            source_P[segment.start + segment.parameter.numel() : stop] = 0.0
            # At once, and into pages not touched before: the host never holds the whole model twice.
            segment.parameter.data = segment.view(self.compute_P)
        cast_parameters(model, dtype)
        self.refresh()
        self._attach_gradients()

    def _attach_gradients(self) -> None:
        if self.grad_P is None:
            return
        for segment in self.segments:
            grad = segment.view(self.grad_P)
            if self.compute_P.dtype == torch.float32:
                segment.parameter.grad = grad  # autograd accumulates into it in place
            else:
                segment.parameter.register_post_accumulate_grad_hook(partial(_add_gradient, grad))

    def refresh(self) -> None:
        """Bring `compute_P` up to date with `master_P`."""
        if self.master_P is not None and self.master_P is not self.compute_P:
            self.compute_P.copy_(self.master_P)

    def source(self, segment: FlatSegment) -> Tensor:
        """The best copy of a parameter: master where there is one."""
        return segment.view(self.compute_P if self.master_P is None else self.master_P)


def _add_gradient(sum_: Tensor, parameter: Tensor) -> None:
    """Add a parameter's bf16 gradient to its fp32 sum as soon as autograd has computed it."""
    assert parameter.grad is not None
    sum_.add_(parameter.grad)
    parameter.grad = None


class FlatAdamW:
    """AdamW on two slices of the flat buffers: matrices with weight decay, the rest without."""

    def __init__(self, flat: FlatParameters, config: Optimizer) -> None:
        assert flat.master_P is not None
        assert flat.grad_P is not None
        self.flat = flat
        self.exp_avg_P = torch.zeros_like(flat.master_P)
        self.exp_avg_sq_P = torch.zeros_like(flat.master_P)
        spans = slice(0, flat.num_decayed), slice(flat.num_decayed, None)
        parts = [nn.Parameter(flat.master_P[span]) for span in spans]
        dims = [(part, ndim) for part, ndim in zip(parts, (2, 1), strict=True) if part.numel()]
        self.adamw = make_adamw(dims, config)
        for part, span in zip(parts, spans, strict=True):
            part.grad = flat.grad_P[span]
            if part.numel():
                step = torch.zeros((), dtype=torch.float32, device=part.device)
                moments = {"exp_avg": self.exp_avg_P[span], "exp_avg_sq": self.exp_avg_sq_P[span]}
                self.adamw.state[part] = {"step": step, **moments}

    def step(self, lr: float) -> None:
        set_learning_rate(self.adamw, lr)
        self.adamw.step()

    def named_state(self) -> dict[str, Tensor]:
        """Return the moments as views, by parameter name."""
        return {
            f"{segment.name}.{kind}": segment.view(moment_P)
            for segment in self.flat.segments
            for kind, moment_P in (("exp_avg", self.exp_avg_P), ("exp_avg_sq", self.exp_avg_sq_P))
        }
