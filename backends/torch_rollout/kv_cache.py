"""The key-value cache: slots side by side, written in place, read through views.

The n sequences being decoded always lie in slots 0 … n-1, so attention reads `cache[:n, :, :L]` and gathers nothing.
Letters: n active slots, KV key/value heads, G query heads per key/value head, D head dim, L longest length + 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from backends.packed.layout import PackedLayout
from backends.packed.packed_attention import Reach, Scoring, additive_mask
from backends.packed.state_layers import LayerState
from backends.torch_rollout.slot_states import SlotStates

LayerTensors = dict[int, tuple[Tensor, Tensor]]  # by layer, of keys and of values


class PromptLayout(PackedLayout):
    """Attention of packed prompts that also keeps every layer's keys and values: `kept[layer]` is
    ([T, KV, D], [T, KV, D]). They are copies: a view would keep the whole projection that it is a part of, queries
    too. All lie in memory that is taken at once: between the layers' own tensors they would cut the heap into pieces
    of which none serves the next layer."""

    def __init__(self, lengths: list[int], device: torch.device, layers: int) -> None:
        super().__init__(lengths, device)
        self.kept: LayerTensors = {}
        self._layers = layers
        self._free: list[Tensor] = []

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, how: Scoring) -> Tensor:
        self.kept[layer_of(module)] = (self._copy(key[0].transpose(0, 1)), self._copy(value[0].transpose(0, 1)))
        return super().attend(module, query, key, value, how)

    def _copy(self, packed: Tensor) -> Tensor:
        if not self.kept and not self._free:
            self._free = list(packed.new_empty((2 * self._layers, *packed.shape)))
        room = self._free.pop() if self._free and self._free[-1].shape == packed.shape else torch.empty_like(packed)
        return room.copy_(packed)


@dataclass(frozen=True)
class PromptBlock:
    """Prompts that went through together: their keys and values per layer, and the logits after each.

    Lives as long as one of its prompts still has completions waiting for a slot.
    """

    kept: LayerTensors  # layer → [T, KV, D] twice
    states: dict[int, LayerState]  # layer → its state after each, where it has one
    logits: Tensor  # [prompts, V]


@dataclass(frozen=True)
class ReadyPrompt:
    """Where one prompt lies in its block."""

    block: PromptBlock
    number: int
    first_row: int
    length: int


@dataclass(frozen=True)
class SlotSegment:
    """Slots start … stop-1, which read the first `length` cached positions."""

    start: int
    stop: int
    length: int


class KvCache:
    """Keys and values of every layer: two tensors [slots, KV, max_len, D] each. A `Layout` for decoding. `states`: what
    layers that carry a state have in the slots.

    Initialised with zeros: masked positions still enter the kernel, where 0 · NaN would be NaN.
    """

    def __init__(
        self,
        kept: LayerTensors,
        states: Mapping[int, LayerState],
        slots: int,
        max_len: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """`kept`, `states`: what each layer has of some sequences."""
        self.slots, self.max_len, self.device, self.dtype = slots, max_len, device, dtype
        self.mask: Tensor | None = torch.zeros(1, 1, 1, 1, device=device)  # 4-D: the model then builds none
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        for layer, (key, value) in kept.items():
            self.keys[layer], self.values[layer] = (
                torch.zeros(slots, heads, max_len, dim, device=device, dtype=dtype)
                for heads, dim in (key.shape[1:], value.shape[1:])
            )
        self.states = SlotStates(states, slots) if states else None
        self._slots = torch.arange(slots, device=device)
        self._segments: list[SlotSegment] = []
        self._positions: Tensor | None = None
        self._ragged: list[bool] = []
        self._masks: dict[tuple[int, Reach], Tensor] = {}

    # ── one decode step ───────────────────────────────────────────────────────────────────────────

    def begin_step(self, position_B: NDArray[np.int64], positions: Tensor, segments: list[SlotSegment]) -> None:
        """The next forward writes slot i at `position_B[i]` and reads all up to it. `positions`: on the device."""
        self._segments, self._positions = segments, positions
        self._ragged = [bool((position_B[s.start : s.stop] + 1 != s.length).any()) for s in segments]
        self._masks = {}

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, how: Scoring) -> Tensor:
        layer = layer_of(module)
        keys, values = self.keys[layer], self.values[layer]
        heads, n = keys.shape[1], query.shape[2]
        slots = self._slots[:n]
        keys[slots, :, self._positions] = key[0].transpose(0, 1)
        values[slots, :, self._positions] = value[0].transpose(0, 1)
        # Query heads that share a key/value head stand as G queries of one head: nothing is repeated.
        q = query.transpose(1, 2).reshape(n, heads if how.function is None else query.shape[1], -1, query.shape[3])
        outputs = []
        for number, s in enumerate(self._segments):
            part, k, v = q[s.start : s.stop], keys[s.start : s.stop, :, : s.length], values[s.start : s.stop]
            v, mask = v[:, :, : s.length], self._mask(number, how.reach, q.dtype)
            if how.function is None:
                outputs.append(decode_attention(part, k, v, mask, how.scaling))
            else:
                outputs.append(how.function(part, k, v, mask))
        out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return out.reshape(1, n, query.shape[1], values.shape[3])

    def _mask(self, number: int, reach: Reach, dtype: torch.dtype) -> Tensor | None:
        """[n, 1, 1, L] of 0 and -inf for a segment; None where every slot reads everything. Made once a step."""
        segment = self._segments[number]
        if reach.covers(segment.length):
            reach = Reach()
        if reach == Reach() and not self._ragged[number]:
            return None
        if (number, reach) not in self._masks:
            assert self._positions is not None
            key_position = torch.arange(segment.length, device=self.device)
            last = self._positions[segment.start : segment.stop, None]
            mask = additive_mask(reach.hides(last, key_position), dtype)
            self._masks[number, reach] = mask[:, None, None]
        return self._masks[number, reach]

    # ── moving sequences ──────────────────────────────────────────────────────────────────────────

    def fill(self, start: int, prompts: Sequence[ReadyPrompt]) -> None:
        """Copy prompts of one block into slots start, start+1, …"""
        block, longest = prompts[0].block, max(prompt.length for prompt in prompts)
        column = np.arange(longest)
        index = np.stack([prompt.first_row + np.minimum(column, prompt.length - 1) for prompt in prompts])
        rows = torch.from_numpy(index.reshape(-1)).to(self.device)
        stop = start + len(prompts)
        for layer, pair in block.kept.items():
            for cache, packed in zip((self.keys[layer], self.values[layer]), pair, strict=True):
                values = packed.index_select(0, rows).unflatten(0, (len(prompts), longest))
                cache[start:stop, :, :longest] = values.transpose(1, 2)
        if self.states is not None:
            numbers = torch.tensor([prompt.number for prompt in prompts], device=self.device)
            self.states.fill(start, numbers, block.states)

    def copy_of(self, slot: int, length: int) -> LayerTensors:
        """Return the first `length` positions of a slot, compact: layer → [length, KV, D] twice."""

        def copied(cache: Tensor) -> Tensor:
            return cache[slot, :, :length].transpose(0, 1).clone(memory_format=torch.contiguous_format)

        return {layer: (copied(keys), copied(self.values[layer])) for layer, keys in self.keys.items()}

    def grow(self, slots: int) -> None:
        """Add free slots behind those that are there."""
        for held in (self.keys, self.values):
            for layer, cache in held.items():
                held[layer] = cache.new_zeros(slots, *cache.shape[1:])
                held[layer][: self.slots] = cache
        if self.states is not None:
            self.states = self.states.grown(slots)
        self.slots, self._slots = slots, torch.arange(slots, device=self.device)

    def move(self, target: NDArray[np.int64], source: NDArray[np.int64], length: int) -> None:
        """Copy the first `length` positions of slots `source` over slots `target`. The two do not overlap."""
        to, of = (torch.from_numpy(slots).to(self.device) for slots in (target, source))
        for cache in (*self.keys.values(), *self.values.values()):
            head = cache[:, :, :length]
            head.index_copy_(0, to, head.index_select(0, of))
        if self.states is not None:
            self.states.copy(to, of)

    def permute(self, order: NDArray[np.int64], length: int) -> None:
        """Slot i takes what slot `order[i]` held, for the first len(order) slots."""
        of = torch.from_numpy(order).to(self.device)
        for cache in (*self.keys.values(), *self.values.values()):
            cache[: len(order), :, :length] = cache[:, :, :length].index_select(0, of)
        if self.states is not None:
            self.states.copy(self._slots[: len(order)], of)


def decode_attention(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float | None) -> Tensor:
    """[n, KV, G, D] over [n, KV, L, D] → [n, KV, G, D].

    Many short reads with few query heads are quicker as two batched matrix products on a CPU (up to 2x at n = 128,
    L = 64): the flash kernel works in blocks of queries, and here a block holds G.
    """
    n, _, per_head, dim = query.shape
    products = query.device.type == "cpu" and query.dtype == torch.float32
    if not products or n < 16 or per_head * keys.shape[2] > 512:
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scaling)
    q, k, v = (t.flatten(0, 1) for t in (query, keys, values))
    factor = dim**-0.5 if scaling is None else scaling
    if mask is None:
        scores = torch.bmm(q, k.transpose(1, 2)).mul_(factor)
    else:
        scores = torch.baddbmm(
            mask.expand(-1, query.shape[1], -1, -1).flatten(0, 1), q, k.transpose(1, 2), alpha=factor
        )
    out: Tensor = torch.bmm(scores.softmax(-1), v).unflatten(0, query.shape[:2])
    return out


def layer_of(module: nn.Module) -> int:
    layer = module.layer_idx
    assert isinstance(layer, int)
    return layer


# ── segments ──────────────────────────────────────────────────────────────────────────────────────

# One attention call over n slots reads n · L rows, L the longest. Where lengths differ much, a few calls over
# neighbouring slots read fewer. Slots get out of order as sequences come and go; they are sorted again as soon as the
# rows read for nothing since the last sort outweigh the sort (the ski-rental rule: at most twice the best cost).
# Rows that an extra attention call must save: its launch costs as much as reading about that many.
LEAST_ROWS_SAVED = 1024
MAX_DEPTH = 2  # up to 4 segments
SORT_COST = 2.0  # a sort reads and writes the cache once: about two reads


def split(read_B: NDArray[np.int64], start: int = 0, depth: int = MAX_DEPTH) -> list[SlotSegment]:
    """Split neighbouring slots into segments that read few rows. `read_B`: cached positions that each slot reads."""
    n, longest = len(read_B), int(read_B.max())
    whole = [SlotSegment(start, start + n, longest)]
    if depth == 0 or n * longest - int(read_B.sum()) < LEAST_ROWS_SAVED:
        return whole
    count = np.arange(1, n)
    before = np.maximum.accumulate(read_B)[:-1]
    after = np.maximum.accumulate(read_B[::-1])[::-1][1:]
    cost = count * before + (n - count) * after
    cut = int(cost.argmin())
    if n * longest - int(cost[cut]) < LEAST_ROWS_SAVED:
        return whole
    left, right = read_B[: cut + 1], read_B[cut + 1 :]
    return split(left, start, depth - 1) + split(right, start + cut + 1, depth - 1)


def rows_read(segments: list[SlotSegment]) -> int:
    return sum((segment.stop - segment.start) * segment.length for segment in segments)


class Order:
    """Says when the slots should be sorted."""

    def __init__(self) -> None:
        self._wasted = 0.0

    def plan(self, read_B: NDArray[np.int64]) -> tuple[list[SlotSegment], NDArray[np.int64] | None]:
        """Segments for this step, and, when it pays, the order (longest first) to bring the slots into before it."""
        segments = split(read_B)
        rows = rows_read(segments)
        if rows - int(read_B.sum()) < LEAST_ROWS_SAVED:
            return segments, None
        order = np.argsort(-read_B, kind="stable")
        in_order = split(read_B[order])
        self._wasted += rows - rows_read(in_order)
        if self._wasted <= SORT_COST * len(read_B) * int(read_B.max()):
            return segments, None
        self._wasted = 0.0
        return in_order, order
