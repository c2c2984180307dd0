"""All parameters of a model as views of one flat buffer, and all gradients as views of another.

One buffer makes one all-reduce, one norm and one optimizer call of a whole step, whatever the model's layout.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from backends.hf import cast_parameters

# Every parameter starts on a cache line (16 fp32 values); the gaps stay zero for ever.
_ALIGN = 16


@dataclass(frozen=True)
class Segment:
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
        self.segments: list[Segment] = []
        size = self.num_decayed = 0
        for name, parameter in ordered:
            self.segments.append(Segment(name, parameter, size))
            size += -(-parameter.numel() // _ALIGN) * _ALIGN
            if parameter.ndim >= 2:
                self.num_decayed = size
        device = next(model.parameters()).device
        self.compute_P = torch.zeros(size, dtype=dtype, device=device)
        self.master_P: Tensor | None = None
        self.grad_P: Tensor | None = None
        if learns:
            self.master_P = self.compute_P if dtype == torch.float32 else torch.zeros(size, device=device)
            self.grad_P = torch.zeros(size, device=device)
        for segment in self.segments:
            if self.master_P is not None:
                segment.view(self.master_P).copy_(segment.parameter.data)
            else:
                segment.view(self.compute_P).copy_(segment.parameter.data)
        cast_parameters(model, dtype)
        for segment in self.segments:
            segment.parameter.data = segment.view(self.compute_P)
        self.refresh()
        self._attach_gradients()

    def _attach_gradients(self) -> None:
        if self.grad_P is None:
            return
        for segment in self.segments:
            grad = segment.view(self.grad_P)
            if self.compute_P.dtype == torch.float32:
                segment.parameter.grad = grad  # autograd adds to it in place
            else:
                segment.parameter.register_post_accumulate_grad_hook(_AddTo(grad))

    def refresh(self) -> None:
        """Bring `compute_P` up to date with `master_P`."""
        if self.master_P is not None and self.master_P is not self.compute_P:
            self.compute_P.copy_(self.master_P)

    def source(self, segment: Segment) -> Tensor:
        """The best copy of a parameter: master where there is one."""
        return segment.view(self.compute_P if self.master_P is None else self.master_P)


class _AddTo:
    """Moves a parameter's bf16 gradient into its fp32 sum as soon as autograd has it."""

    def __init__(self, grad: Tensor) -> None:
        self.grad = grad

    def __call__(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self.grad.add_(parameter.grad)
        parameter.grad = None


class Parking:
    """Moves flat buffers off the device and back, leaving every view of them intact.

    A parked tensor keeps its shape but its storage is emptied. On CPU there is nowhere to go: only what `drop` names
    is let go of (and comes back as zeros).
    """

    def __init__(self) -> None:
        self._parked: list[tuple[Tensor, Tensor | None, int]] = []

    @property
    def parked(self) -> bool:
        return bool(self._parked)

    def park(self, keep: list[Tensor], drop: list[Tensor]) -> None:
        for tensor in keep:
            storage = tensor.untyped_storage()
            if tensor.device.type == "cpu":
                continue
            host = torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
            self._parked.append((tensor, host, storage.nbytes()))
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._parked += [(tensor, None, tensor.untyped_storage().nbytes()) for tensor in drop]
        for tensor, _, _ in self._parked:
            tensor.untyped_storage().resize_(0)

    def unpark(self) -> None:
        for tensor, host, nbytes in self._parked:
            tensor.untyped_storage().resize_(nbytes)
            if host is None:
                tensor.zero_()
            else:
                tensor.copy_(host, non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._parked = []
