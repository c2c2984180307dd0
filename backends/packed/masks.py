"""Attention masks of packed rows: which earlier tokens each token sees.

A token sees its own segment and the one that its segment continues, up to itself, in layers with a sliding window only
so far back. Suffix: T tokens of the row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import PretrainedConfig, PreTrainedModel

from backends.packed.staging import Staging

FULL, SLIDING = "full_attention", "sliding_attention"  # transformers' names for kinds of layers
Mask = TypeVar("Mask")


class PackedRows:
    """Segments of `lengths`, one after another; each is a sequence or continues segment `parents[i]` (-1: none)."""

    def __init__(
        self,
        positions_T: NDArray[np.int64],
        lengths: Sequence[int],
        parents: Sequence[int] | None,
        staging: Staging,
    ) -> None:
        segment_T = np.repeat(np.arange(len(lengths)), lengths)
        continued = np.full(len(lengths), -1) if parents is None else np.asarray(parents)
        self.length, self.device = len(segment_T), staging.device
        self.segment_T, self.parent_T, self.position_T = (
            staging.put(column) for column in (segment_T, continued[segment_T], positions_T)
        )
        staging.send()  # masks are made of them at once

    # What compares queries with keys must not compute with them first: [T, T] of whole numbers are 8 bytes each.
    def sees(self, window: int | None) -> Callable[[Any, Any, Tensor, Tensor], Tensor]:
        """Whether the token in row `query` sees the one in row `key`; as flex_attention wants it."""
        segment_T, parent_T, position_T = self.segment_T, self.parent_T, self.position_T

        def seen(_batch: Any, _head: Any, query: Tensor, key: Tensor) -> Tensor:
            together = (segment_T[query] == segment_T[key]) | (parent_T[query] == segment_T[key])
            return together & (position_T[query] >= position_T[key])

        if window is None:
            return seen

        def seen_in_window(_batch: Any, _head: Any, query: Tensor, key: Tensor) -> Tensor:
            return seen(_batch, _head, query, key) & ((position_T - window)[query] < position_T[key])

        return seen_in_window


def additive_masks(model: PreTrainedModel, rows: PackedRows) -> Tensor | dict[str, Tensor]:
    """[1, 1, T, T], 0 or the dtype's lowest value, for eager attention; by kind of layer where a model mixes kinds."""
    row_T = torch.arange(rows.length, device=rows.device)

    def make(window: int | None) -> Tensor:
        seen = rows.sees(window)(None, None, row_T[:, None], row_T)
        mask = torch.zeros(seen.shape, dtype=model.dtype, device=rows.device)
        return mask.masked_fill_(~seen, torch.finfo(model.dtype).min)[None, None]

    return _by_kind_of_layer(model, make)


def block_masks(model: PreTrainedModel, rows: PackedRows) -> BlockMask | dict[str, BlockMask]:
    """The masks for flex_attention, which leaves out blocks that nobody sees."""

    def make(window: int | None) -> BlockMask:
        return create_block_mask(rows.sees(window), None, None, rows.length, rows.length, device=rows.device)

    return _by_kind_of_layer(model, make)


def _by_kind_of_layer(model: PreTrainedModel, make: Callable[[int | None], Mask]) -> Mask | dict[str, Mask]:
    text: PretrainedConfig = model.config.get_text_config()
    window = getattr(text, "sliding_window", None)
    kinds = set(getattr(text, "layer_types", None) or ())
    if window is None or kinds == {FULL}:
        return make(None)
    return {FULL: make(None), SLIDING: make(window)} if FULL in kinds else make(window)
