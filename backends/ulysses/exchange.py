"""From some rows of all heads to all rows of some heads, and back: one message to each rank of a sequence group.

Letters: T tokens of the whole row, L of them this rank's, h heads, D head dim, S ranks of the group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.autograd.function import once_differentiable

from backends.ulysses.sequence_group import SequenceGroup

Parts = tuple[Tensor, ...]
Way = Callable[[Parts, SequenceGroup], Parts]


def rows_to_heads(parts: Sequence[Tensor], group: SequenceGroup) -> Parts:
    """Each [1, h, L, D], this rank's rows of all heads → [1, h/S, T, D], all rows of this rank's heads: the first rank
    has the first heads. S divides each h. All parts travel in one message where they have one dtype."""
    if len({part.dtype for part in parts}) > 1:
        return tuple(rows_to_heads([part], group)[0] for part in parts)
    whole: Parts = _Exchange.apply(group, _to_heads, _to_rows, *(part[0].transpose(0, 1) for part in parts))
    return tuple(part.transpose(0, 1)[None] for part in whole)


def heads_to_rows(x: Tensor, group: SequenceGroup) -> Tensor:
    """[1, T, h, D], all rows of this rank's heads → [1, L, h·S, D], this rank's rows of all heads."""
    rows: Parts = _Exchange.apply(group, _to_rows, _to_heads, x[0])
    return rows[0][None]


class _Exchange(torch.autograd.Function):
    """(group, this way, the way back, parts) → parts."""

    @staticmethod
    def forward(ctx: Any, group: SequenceGroup, there: Way, back: Way, *parts: Tensor) -> Parts:
        ctx.group, ctx.back = group, back
        return there(parts, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, *ctx.back(grads, ctx.group)


def _to_heads(parts: Parts, group: SequenceGroup) -> Parts:
    """Each [L, h, D] → [T, h/S, D]."""
    size = group.size
    sent = [part.unflatten(1, (size, -1)).transpose(0, 1) for part in parts]  # S L h/S D
    return _exchange(sent, group, lambda got: got.flatten(0, 1))


def _to_rows(parts: Parts, group: SequenceGroup) -> Parts:
    """Each [T, h, D] → [L, h·S, D]."""
    sent = [part.unflatten(0, (group.size, -1)) for part in parts]  # S L h D
    return _exchange(sent, group, lambda got: got.transpose(0, 1).flatten(1, 2))


def _exchange(parts: Sequence[Tensor], group: SequenceGroup, arrange: Callable[[Tensor], Tensor]) -> Parts:
    """Each part [S, …] with something for each rank → what each rank had for this one, arranged."""
    widths = [part[0].numel() for part in parts]
    # Written side by side into memory of its own: gloo and NCCL want every rank's share in one contiguous piece.
    sent = parts[0].new_empty(group.size, sum(widths))
    for part, place in zip(parts, sent.split(widths, 1), strict=True):
        place.unflatten(1, part.shape[1:]).copy_(part)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group.group)
    return tuple(
        arrange(place.unflatten(1, part.shape[1:])).contiguous()
        for part, place in zip(parts, received.split(widths, 1), strict=True)
    )
