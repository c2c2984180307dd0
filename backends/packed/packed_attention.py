"""Attention that knows where one sequence ends and the next begins.

Models run on one packed row `[1, T]` without padding. Hugging Face models call attention through a registry;
`install` puts `sdpa_by_layout` and `eager_by_layout` there. While a *layout* is current, it splits the row into batches
of sequences for them (`PackedLayout` in training, the KV cache in decoding); without one, the stock function runs.

Letters: T tokens of the row, n sequences of a batch, L tokens of each, H query heads, KV key/value heads, D head dim.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from backends.ulysses.split_attention import AttentionFunction
from specs.errors import ModelError

# Keyword arguments that change what attention computes and that sdpa does not know.
_UNSUPPORTED = ("softcap", "s_aux", "position_bias")
_EAGER = "eager_attention_forward"  # names end so in transformers' models
_NO_CODE = (lambda: None).__code__
SLIDING, CHUNKED = "sliding_attention", "chunked_attention"  # transformers' names for kinds of layers

Scored = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""query [n, H, Q, D], key and value [n, KV, L, D], mask [.., Q, L] of 0 and -inf (None: nothing is hidden) →
[n, Q, H, D]."""


class Reach(NamedTuple):
    """How far back a layer sees: `window` tokens with the own one, and not beyond the own chunk of `chunk` tokens."""

    window: int | None = None
    chunk: int | None = None

    def covers(self, length: int) -> bool:
        """Return whether every token of a sequence of this length sees all before it."""
        return all(limit is None or length <= limit for limit in self)

    def first(self, position: Tensor) -> Tensor:
        """Return the first position that a token at each of these sees; below 0: it sees all before it."""
        first = torch.zeros_like(position) if self.window is None else position - (self.window - 1)
        return first if self.chunk is None else torch.maximum(first, position - position % self.chunk)

    def hides(self, query: Tensor, key: Tensor) -> Tensor:
        """Return whether tokens at positions `query` do not see those at positions `key`."""
        hidden = key > query
        return hidden if self == Reach() else hidden.logical_or_(key < self.first(query))


class Scoring(NamedTuple):
    """How a layer scores: `function` computes a batch of sequences; None: sdpa, with `scaling`."""

    scaling: float | None = None
    reach: Reach = Reach()
    function: Scored | None = None


class Layout(Protocol):
    """Computes attention for a packed row. Keys and values come with KV heads, not repeated."""

    mask: Tensor | None

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, how: Scoring) -> Tensor:
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
    _check(module, attention_mask, kwargs)
    return _current.attend(module, query, key, value, Scoring(kwargs.get("scaling"), _reach(module, kwargs))), None


def eager_by_layout(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Compute "eager" as it is in this process: the model's own function, with its softcap, sinks and the like, on the
    current layout's batches of sequences, or on what it is given."""
    own = eager_function(type(module))
    if own is None:
        raise ModelError(f"the code of {type(module).__name__} does not say which function its eager attention is")
    if _current is None:
        return own(module, query, key, value, attention_mask, **kwargs)
    _check(module, attention_mask, kwargs)

    def function(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        return own(module, query, key, value, mask, **kwargs)[0]

    return _current.attend(module, query, key, value, Scoring(None, _reach(module, kwargs), function)), None


def eager_function(module_class: type[nn.Module]) -> AttentionFunction | None:
    """Return what a layer of this class calls for eager attention: its model's own function. None where its code does
    not name one."""
    forward = inspect.unwrap(module_class.forward)
    names = [name for name in getattr(forward, "__code__", _NO_CODE).co_names if name.endswith(_EAGER)]
    function: AttentionFunction | None = forward.__globals__.get(names[0]) if len(names) == 1 else None
    return function


def additive_mask(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """Return -inf where `hidden`, else 0."""
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)


def _check(module: nn.Module, attention_mask: Tensor | None, kwargs: dict[str, Any]) -> None:
    if attention_mask is not None and attention_mask.numel() > 1:  # what the layout gave to the model has one element
        raise ModelError(
            f"{type(module).__name__} makes masks of its own, which are not seen on packed rows",
            hint="this architecture is not supported",
        )
    if kwargs.get("is_causal") is False or not getattr(module, "is_causal", True):
        raise ModelError(f"{type(module).__name__} sees later tokens", hint="name a causal language model")
    assert not kwargs.get("dropout"), "dropout is switched off when a model is built"


def _reach(module: nn.Module, kwargs: dict[str, Any]) -> Reach:
    """Return how far a layer sees: the window that it hands on, or what its kind of layer has."""
    config: Any = getattr(module, "config", None)
    kinds, number = getattr(config, "layer_types", None) or (), getattr(module, "layer_idx", -1)
    kind = kinds[number] if number in range(len(kinds)) else ""  # a layer that others share may have no number
    window = config.sliding_window if kind == SLIDING else kwargs.get("sliding_window")
    return Reach(window, config.attention_chunk_size if kind == CHUNKED else None)


def install() -> None:
    """Register both in this process. Calling it again does nothing.

    cuDNN, torch's first choice on Hopper and Blackwell, builds a plan per shape and keeps it for ever, which takes half
    a second for every new length. Micro-batches and decode steps hardly ever have the same shape twice.
    """
    ALL_ATTENTION_FUNCTIONS["sdpa"] = sdpa_by_layout
    ALL_ATTENTION_FUNCTIONS["eager"] = eager_by_layout
    torch.backends.cuda.enable_cudnn_sdp(False)


class RowPositions:
    """Stands in for the cache of Llama 4's layers without rotary positions: from it they read at which position a row
    begins, to scale queries by position. Here it is how far each token's own is from its place in the row."""

    def __init__(self, position_T: Tensor) -> None:
        self._offset_T = position_T - torch.arange(len(position_T), device=position_T.device)

    def get_seq_length(self, layer_idx: int) -> Tensor:
        return self._offset_T

    def update(self, key: Tensor, value: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        return key, value


def tell_positions(model: nn.Module) -> None:
    """Have layers that scale queries by position do so by that of each token, not by its place in a packed row."""

    def tell(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, kwargs | {"past_key_values": RowPositions(kwargs["position_ids"][0])}

    for module in model.modules():
        if any(getattr(child, "attn_temperature_tuning", False) for child in module.children()):
            module.register_forward_pre_hook(tell, with_kwargs=True)
            module._can_checkpoint_with_cache = True  # type: ignore[assignment]  # else recomputed layers are not told
