"""Attention that knows where one sequence ends and the next begins.

Models run on one packed row `[1, T]` without padding. Hugging Face models call attention through a registry;
`install` puts `sdpa_by_layout` there under the name "sdpa". While a *layout* is current, it computes attention
(`PackedLayout` in training, the KV cache in decoding); without one, the stock function runs.

Letters: T tokens of the row, H query heads, KV key/value heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from specs.errors import ModelError

# Keyword arguments that change what attention computes and that a layout does not implement.
_UNSUPPORTED = ("softcap", "s_aux", "position_bias")


class Layout(Protocol):
    """Computes attention for a packed row. Keys and values come with KV heads, not repeated."""

    mask: Tensor | None

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float | None,
        sliding_window: int | None,
    ) -> Tensor:
        """query [1, H, T, D], key and value [1, KV, T, D] → [1, T, H, D]."""
        ...


# A plain global, not a context variable: on CUDA, gradient checkpointing recomputes the forward pass
# on the autograd engine's own threads, which do not inherit context.
_current: Layout | None = None


@contextmanager
def use_layout(layout: Layout) -> Iterator[None]:
    """Make `layout` the current one; it must stay so until the backward pass is done (recomputation)."""
    global _current
    previous, _current = _current, layout
    try:
        yield
    finally:
        _current = previous


def sdpa_by_layout(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Compute "sdpa" as it is in this process: the current layout's attention, or the stock one."""
    if _current is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    refused = [name for name in _UNSUPPORTED if kwargs.get(name) is not None]
    if refused:
        raise ModelError(
            f"attention of {type(module).__name__} uses {', '.join(refused)}, which sdpa does not compute",
            hint='set model.attn_implementation = "eager"',
        )
    if attention_mask is not None and attention_mask.numel() > 1:  # what the layout gave to the model has one element
        raise ModelError(
            f"{type(module).__name__} makes masks of its own, which sdpa does not see on packed rows",
            hint='set model.attn_implementation = "eager"',
        )
    assert not kwargs.get("dropout"), "dropout is switched off when a model is built"
    assert kwargs.get("is_causal") is not False, "only causal attention is packed"
    assert getattr(module, "is_causal", True), "only causal attention is packed"
    window = kwargs.get("sliding_window")
    return _current.attend(module, query, key, value, scaling=kwargs.get("scaling"), sliding_window=window), None


def install() -> None:
    """Register `sdpa_by_layout` as "sdpa" in this process. Calling it again does nothing.

    cuDNN, torch's first choice on Hopper and Blackwell, builds a plan per shape and keeps it for ever, which takes half
    a second for every new length. Micro-batches and decode steps hardly ever have the same shape twice.
    """
    ALL_ATTENTION_FUNCTIONS["sdpa"] = sdpa_by_layout
    torch.backends.cuda.enable_cudnn_sdp(False)
