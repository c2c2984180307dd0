"""How tensors of a Hugging Face model lie in the parameters of a Megatron model: pure functions, both ways.

A parameter of Megatron-core's GPT model is one tensor of the Hugging Face model, or several fused. Each of these is
sharded equally across the tensor ranks, and a rank fuses its own shards: first sharded, then fused.

- Attention: for every group of query heads that share a key head, the rows of its queries, its key, its value.
- MLP: the rows of the gate, then the rows of the up projection.
- Vocabulary: rows of zeros at the end make it divisible by the tensor ranks.
- Experts: Hugging Face has all of a layer in one tensor, Megatron each apart, as an MLP. An expert's gate, up and down
  projection are rows of that tensor, seen as a matrix.

Letters: G groups of query heads (key heads), R query heads of a group, D head dim, V vocabulary, X experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Fusion = Literal["none", "qkv", "gate_up"]


@dataclass(frozen=True)
class Heads:
    """Attention heads of the whole model."""

    query: int
    key: int
    dim: int


@dataclass(frozen=True)
class Slot:
    """A parameter of one pipeline stage and the tensors that it is made of.

    `shard_dim`: the dim along which each of them is sharded across tensor ranks; None: every rank has all of it.
    `padded`: the rows that they are padded to before that; 0: none. `rows`: of an expert, which rows of each tensor it
    is made of, where all dims but the last are one; its tensor ranks are those of experts.
    """

    parameter: str
    weights: tuple[str, ...]
    shard_dim: int | None = None
    fusion: Fusion = "none"
    padded: int = 0
    rows: tuple[range, ...] = ()

    @property
    def sources(self) -> list[tuple[str, range | None]]:
        """Name and rows of each part; None: all."""
        rows: Sequence[range | None] = self.rows or [None] * len(self.weights)
        return list(zip(self.weights, rows, strict=True))


@dataclass(frozen=True)
class Experts:
    """Return the layouts of each sparse layer. `hidden`: rows of the down projection; `inner`: of the gate and of the
    up projection, one below the other in [X, 2·inner, hidden]."""

    count: int
    inner: int
    hidden: int

    def fc1(self, parameter: str, name: str, expert: int) -> Slot:
        first = 2 * self.inner * expert
        gate, up = range(first, first + self.inner), range(first + self.inner, first + 2 * self.inner)
        return Slot(parameter, (name, name), shard_dim=0, fusion="gate_up", rows=(gate, up))

    def fc2(self, parameter: str, name: str, expert: int) -> Slot:
        rows = range(self.hidden * expert, self.hidden * (expert + 1))
        return Slot(parameter, (name,), shard_dim=1, rows=(rows,))


def padded_vocabulary(vocabulary: int, tensor_ranks: int) -> int:
    """Rows of the embedding, so that every tensor rank has as many."""
    return -(-vocabulary // tensor_ranks) * tensor_ranks


def part_of(size: int, rank: int, ranks: int) -> range:
    """Return what a tensor rank has of rows or columns, an expert rank of experts, a pipeline stage of layers: all as
    many."""
    assert size % ranks == 0, (size, ranks)
    each = size // ranks
    return range(rank * each, (rank + 1) * each)


def source(whole: Tensor, rows: range | None) -> Tensor:
    """One of `Slot.sources`, a view of its tensor."""
    return whole if rows is None else whole.flatten(0, -2)[rows.start : rows.stop]


def put_experts(whole: Tensor, slots: Sequence[Slot], held: Sequence[Sequence[Tensor]], heads: Heads) -> None:
    """Fill the tensor of all experts. `slots`: of each of them; `held`: its parameter on each of its tensor ranks."""
    for slot, ranks in zip(slots, held, strict=True):
        parts = [unfuse(each, slot, heads) for each in ranks]
        for place, (_, rows) in enumerate(slot.sources):
            source(whole, rows).copy_(whole_tensor([part[place] for part in parts], slot, 0))


def own_rows(slot: Slot, rows: int, rank: int, ranks: int) -> range:
    """Rows of one of the slot's tensors, which has so many, that a tensor rank needs."""
    if slot.shard_dim != 0:
        return range(rows)
    part = part_of(slot.padded or rows, rank, ranks)
    return range(min(part.start, rows), min(part.stop, rows))


def own_part(read: Tensor, slot: Slot, rank: int, ranks: int) -> Tensor:
    """A tensor rank's part of one of the slot's tensors, from its `own_rows` of it."""
    if slot.shard_dim == 1:
        part = part_of(read.shape[1], rank, ranks)
        return read[:, part.start : part.stop]
    missing = slot.padded // ranks - len(read) if slot.padded else 0
    return torch.cat([read, read.new_zeros(missing, *read.shape[1:])]) if missing else read


def whole_tensor(parts: Sequence[Tensor], slot: Slot, rows: int) -> Tensor:
    """One of the slot's tensors from the parts of all tensor ranks, in their order; `rows`: without padding."""
    joined = parts[0] if slot.shard_dim is None else torch.cat(list(parts), dim=slot.shard_dim)
    return joined[:rows] if slot.padded else joined


def fuse(parts: Sequence[Tensor], slot: Slot, heads: Heads) -> Tensor:
    """A rank's parameter from its parts of the slot's tensors."""
    if slot.fusion == "none":
        (one,) = parts
        return one
    if slot.fusion == "gate_up":
        return torch.cat(list(parts))
    q, k, v = parts
    groups = k.shape[0] // heads.dim
    return torch.cat([each.reshape(groups, -1, *each.shape[1:]) for each in (q, k, v)], dim=1).flatten(0, 1)


def unfuse(parameter: Tensor, slot: Slot, heads: Heads) -> list[Tensor]:
    """A rank's parts of the slot's tensors from its parameter."""
    if slot.fusion == "none":
        return [parameter]
    if slot.fusion == "gate_up":
        return list(parameter.chunk(2))
    each = heads.query // heads.key
    groups = parameter.shape[0] // (heads.dim * (each + 2))
    by_group = parameter.reshape(groups, -1, *parameter.shape[1:])
    parts = by_group.split([each * heads.dim, heads.dim, heads.dim], dim=1)
    return [part.flatten(0, 1) for part in parts]
