"""Layers that carry a state from token to token (gated delta nets, Mamba 2, short convolutions) on packed rows.

transformers runs such a layer over a row as if it were one sequence: state and convolution run on from one sample into
the next. Here a layer runs over each sequence of the row by itself, and a completion begins in the state in which its
prompt ended, which is computed once for all of them.

Suffixes and letters: T tokens of the row, P rows after padding, S segments, E hidden size.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol
from weakref import WeakSet

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from backends.packed.layout import groups_of_like_length
from backends.packed.row_ops import Put, RowCopies, copy_rows, take_rows
from specs.errors import ModelError

_LENGTHS = (5, 7, 3, 1, 4)  # of the segments that a build is tried with; of the first two one is padded
_PARENTS = (-1, -1, 1, 1, 0)
_LARGEST_GAP = 1e-4
_CACHE = ("cache_params", "past_key_values")  # what such layers call the argument that holds their state


class LayerState:
    """The state of one layer after some tokens of each sequence of a batch, behind the verbs of transformers' cache.

    Nothing is changed in place, so that gradients reach the prompt that a state came from. `recurrent` is None in
    layers that have a convolution alone. `mask`: [n, L] of the batch that comes, 0 at padding.
    """

    def __init__(self, conv: Tensor | None = None, recurrent: Tensor | None = None, mask: Tensor | None = None) -> None:
        self.conv, self.recurrent, self.mask = conv, recurrent, mask

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.conv

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.recurrent

    def is_recording_past(self, layer_idx: int) -> bool:
        return True  # or a single token would take the kernel that writes into the state

    def update_conv_state(
        self, inputs: Tensor, layer_idx: int, state_idx: int = 0, *, conv_kernel_size: int, **_: Any
    ) -> Tensor:
        """[n, C, L] → [n, C, kept + L]: the inputs with those before them that the convolution still sees. A projection
        with a bias makes more than zeros of padding, which the convolution must not see."""
        inputs = inputs if self.mask is None else inputs * self.mask[:, None]
        whole = inputs if self.conv is None else torch.cat([self.conv, inputs], -1)
        self.conv = F.pad(whole, (max(0, conv_kernel_size - whole.shape[-1]), 0))[..., -conv_kernel_size:]
        return whole

    def update_recurrent_state(self, state: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        self.recurrent = state
        return state

    @property
    def tensors(self) -> tuple[Tensor | None, Tensor | None]:
        return self.conv, self.recurrent

    def select(self, rows: Tensor) -> LayerState:
        """Return the states of these sequences; one may come several times."""
        return LayerState(*(None if each is None else each.index_select(0, rows) for each in self.tensors))

    @staticmethod
    def concat(states: Sequence[LayerState]) -> LayerState:
        columns = zip(*(state.tensors for state in states), strict=True)
        found = ([each for each in column if each is not None] for column in columns)
        return LayerState(*(torch.cat(column) if column else None for column in found))


@dataclass(frozen=True)
class _Group:
    """Segments that run as one batch [count, length].

    `mask`: [count, length], 0 where a row is padded at its left; None where it is padded at its right, or not at all.
    `parents`: which of the prompts the segments continue; None: they begin from nothing.
    """

    count: int
    length: int
    mask: Tensor | None
    parents: Tensor | None


class Layer(Protocol):
    """A layer over a batch [n, L, E] of sequences that begin in a state, which it changes. `mask`: [n, L], 0 at rows
    that leave the state as it is, all of them before the first that counts."""

    def __call__(self, batch: Tensor, state: LayerState, mask: Tensor | None = None) -> Tensor: ...


class StateRows(Protocol):
    """Which sequences the rows of a packed row belong to, for layers with a state."""

    def run(self, number: int, layer: Layer, hidden_TE: Tensor) -> Tensor:
        """Return what layer `number` makes of the row, [T, E] → [T, E]."""
        ...


class SegmentPlan:
    """How layers with a state run over a packed row of segments, each a sequence or the continuation of one.

    What begins from nothing comes first, and its states are kept for what continues it. Segments of like length make a
    batch. Those that begin from nothing are padded at their left and masked, as transformers pads prompts, so that each
    ends with its own last token; their continuations are padded at their right, where nothing that follows changes
    them.
    """

    def __init__(self, lengths: Sequence[int], parents: Sequence[int] | None, put: Put) -> None:
        length_S = np.array(lengths)
        parent_S = np.full(len(length_S), -1) if parents is None else np.array(parents)
        assert (parent_S[parent_S[parent_S >= 0]] < 0).all(), "a segment that is continued continues none"
        start_S = np.cumsum(length_S) - length_S
        index: list[NDArray[np.int64]] = []
        real: list[NDArray[np.bool_]] = []
        self.groups: list[_Group] = []
        place_S = np.full(len(length_S), -1)  # of the state of each that begins from nothing
        for forked in (False, True):
            order = np.flatnonzero((parent_S >= 0) == forked)
            order = order[np.argsort(-length_S[order], kind="stable")]
            if not forked:
                place_S[order] = np.arange(len(order))
            for count, longest in groups_of_like_length(length_S[order].tolist()):
                segments, order = order[:count], order[count:]
                # A single token would take the kernel of decoding, which has no backward pass in some families.
                longest = max(longest, 2) if forked else longest
                own = length_S[segments][:, None]
                place = np.arange(longest) - (0 if forked else longest - own)
                index.append((start_S[segments][:, None] + place.clip(0, own - 1)).ravel())
                real.append(((place >= 0) & (place < own)).ravel())
                mask = put((place >= 0).astype(np.int64)) if not forked and own.min() < longest else None
                self.groups.append(_Group(count, longest, mask, put(place_S[parent_S[segments]]) if forked else None))
        index_P, real_P = np.concatenate(index), np.concatenate(real)
        inverse_T = np.zeros(int(length_S.sum()), dtype=np.int64)
        inverse_T[index_P[real_P]] = np.flatnonzero(real_P)
        self.copies, self.inverse_T = RowCopies(index_P, len(inverse_T), put, real_P), put(inverse_T)
        self.place_S = put(place_S)

    def run(self, number: int, layer: Layer, hidden_TE: Tensor) -> Tensor:
        return self._run(layer, hidden_TE)[0]

    def _run(self, layer: Layer, hidden_TE: Tensor) -> tuple[Tensor, LayerState]:
        """Return the row, and the states of what begins from nothing, in the order of `place_S`."""
        parts = copy_rows(hidden_TE, self.copies).split([group.count * group.length for group in self.groups])
        ended: list[LayerState] = []
        outputs = []
        for part, group in zip(parts, self.groups, strict=True):
            batch = part.unflatten(0, (group.count, group.length))
            if group.parents is None:
                ended.append(LayerState(mask=group.mask))
                outputs.append(layer(batch, ended[-1], group.mask).flatten(0, 1))
            else:
                outputs.append(layer(batch, LayerState.concat(ended).select(group.parents)).flatten(0, 1))
        return take_rows(torch.cat(outputs), self.inverse_T), LayerState.concat(ended)


class PromptPlan(SegmentPlan):
    """Prompts one after another, whose states are kept: `ended[layer]`, in the order of the prompts."""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        super().__init__(lengths, None, lambda array: torch.from_numpy(array).to(device))
        self.ended: dict[int, LayerState] = {}

    def run(self, number: int, layer: Layer, hidden_TE: Tensor) -> Tensor:
        out_TE, ended = self._run(layer, hidden_TE)
        self.ended[number] = ended.select(self.place_S)
        return out_TE


# Globals as in `packed_attention`: recomputation runs on threads of the autograd engine.
_current: StateRows | None = None
_installed: WeakSet[PreTrainedModel] = WeakSet()


@contextmanager
def use_rows(rows: StateRows | None) -> Iterator[None]:
    """Make `rows` the current row's; they must stay so until the backward pass is done (recomputation). None: a row is
    one sequence."""
    global _current
    previous, _current = _current, rows
    try:
        yield
    finally:
        _current = previous


def has_state_layers(model: PreTrainedModel) -> bool:
    return model in _installed


def state_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers that keep a convolution's or a recurrence's state in transformers' cache."""
    kinds = {kind for kind in {type(module) for module in model.modules()} if _keeps_state(kind)}
    return [module for module in model.modules() if type(module) in kinds]


def _keeps_state(kind: type[nn.Module]) -> bool:
    methods = [inspect.unwrap(each) for each in vars(kind).values() if inspect.isfunction(each)]
    return any("update_conv_state" in method.__code__.co_names for method in methods)


def install(model: PreTrainedModel) -> None:
    """Make the state layers of this model run by `use_rows`. Outside it they run as transformers has them."""
    layers = state_layers(model)
    for layer in layers:
        _by_rows(layer)
    if layers:
        _installed.add(model)


@torch.enable_grad()
def prove_gradients(model: PreTrainedModel, device: torch.device) -> None:
    """Gradients of a packed row must be those of its sequences one by one, on a new layer of each kind that the model
    has, in fp32. (The whole model's forward pass is proven by `verify_packing`.) Raises ModelError: catches a state
    whose gradient does not reach the prompt that it came from."""
    width = model.config.get_text_config().hidden_size
    for layer in {type(layer): layer for layer in state_layers(model)}.values():
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(0)
            gap = _gradient_gap(_made_anew(layer, model).to(device, torch.float32), width, device)
        if not gap < _LARGEST_GAP:
            raise ModelError(
                f"{type(layer).__name__} gives other gradients on packed sequences than one by one "
                f"(relative gap {gap:.2g})",
                hint="this architecture is not supported: its layers do not hand a state's gradient on",
            )


def _gradient_gap(layer: nn.Module, width: int, device: torch.device) -> float:
    """Return how far the gradients of a packed row are from those of its sequences, relative to the largest."""
    hidden_TE = torch.randn(sum(_LENGTHS), width, device=device, requires_grad=True)
    weight_TE = torch.randn(sum(_LENGTHS), width, device=device)
    plan = SegmentPlan(_LENGTHS, _PARENTS, lambda array: torch.from_numpy(array).to(device))
    packed_TE = plan.run(0, _with_state(layer), hidden_TE)
    x_S = hidden_TE.split(_LENGTHS)
    alone = [
        layer(x[None])[0] if parent < 0 else layer(torch.cat([x_S[parent], x])[None])[0, _LENGTHS[parent] :]
        for x, parent in zip(x_S, _PARENTS, strict=True)
    ]
    values = [hidden_TE, *(weight for weight in layer.parameters() if weight.requires_grad)]
    ours, theirs = (
        torch.autograd.grad((output_TE * weight_TE).sum(), values, allow_unused=True)
        for output_TE in (packed_TE, torch.cat(alone))
    )
    pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if a is not None and b is not None]
    return max(float((a - b).abs().max()) for a, b in pairs) / max(float(b.abs().max()) for _, b in pairs)


def _made_anew(layer: nn.Module, model: PreTrainedModel) -> nn.Module:
    """Return a layer of this kind with weights of its own, and with the buffers that its block gave to this one."""
    kind: Any = type(layer)
    twin: nn.Module = kind(model.config.get_text_config(), layer.layer_idx)
    for module in twin.modules():
        if not hasattr(module, "reset_parameters"):  # what is not torch's own may hold whatever was in memory
            model._init_weights(module)
    for name, buffer in layer.named_buffers(recurse=False):
        if not hasattr(twin, name):
            twin.register_buffer(name, buffer.clone())
    return twin


def _with_state(layer: nn.Module) -> Layer:
    """Return the layer as one that begins in a state."""
    forward = layer.forward
    name = next(each for each in _CACHE if each in inspect.signature(forward).parameters)
    return lambda batch, state, mask=None: forward(batch, **{name: state, "attention_mask": mask})


def _by_rows(layer: nn.Module) -> None:
    number, whole = layer.layer_idx, layer.forward
    assert isinstance(number, int)
    with_state = _with_state(layer)

    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if _current is None:
            output: Tensor = whole(hidden_states, *args, **kwargs)
            return output
        return _current.run(number, with_state, hidden_states[0])[None]

    layer.forward = forward
    layer.register_forward_pre_hook(_by_position, with_kwargs=True)
    if getattr(layer, "time_step_limit", (0.0,))[0] > 0:
        layer.in_proj.register_forward_hook(partial(_bound_step, layer))  # type: ignore[union-attr]


def _bound_step(layer: nn.Module, _module: nn.Module, _args: tuple[Any, ...], out: Tensor) -> Tensor:
    """Bound the time step of a single token from below, at the end of what enters Mamba 2, as transformers bounds those
    of several: it leaves that out where it decodes (Nemotron-H)."""
    if out.shape[1] > 1:
        return out
    bias: Any = layer.dt_bias
    least = math.log(math.expm1(layer.time_step_limit[0])) - bias  # type: ignore[index]
    return torch.cat([out[..., : -len(bias)], torch.maximum(out[..., -len(bias) :], least.to(out.dtype))], -1)


def _by_position(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Hand the layer its input by position, where hooks for the backward pass look for it (DeepSpeed's among them)."""
    return args or (kwargs.pop("hidden_states"),), kwargs
