"""Masks of packed rows for flex_attention: which earlier tokens each token sees.

A token sees its own segment and the one that its segment continues, up to itself, in layers with a sliding window or
with chunks only so far back. Suffix: T tokens of the row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import PretrainedConfig, PreTrainedModel

from backends.packed.packed_attention import CHUNKED, SLIDING, Reach
from backends.packed.packing import MicroBatch
from backends.packed.staging import Staging

FULL = "full_attention"


class PackedRows:
    """Segments of a micro-batch, one after another; each is a sequence or continues another one."""

    def __init__(self, micro: MicroBatch, staging: Staging) -> None:
        segment_T = np.repeat(np.arange(len(micro.lengths)), micro.lengths)
        columns = segment_T, np.array(micro.parents)[segment_T], micro.positions_T
        self.length, self.device = len(segment_T), staging.device
        self.segment_T, self.parent_T, self.position_T = map(staging.put, columns)
        staging.send()  # masks are made of them at once

    # What compares queries with keys must not compute with them first: [T, T] of whole numbers are 8 bytes each.
    def sees(self, reach: Reach) -> Callable[[Any, Any, Tensor, Tensor], Tensor]:
        """Whether the token in row `query` sees the one in row `key`; as flex_attention wants it."""
        segment_T, parent_T, position_T = self.segment_T, self.parent_T, self.position_T

        def seen(_batch: Any, _head: Any, query: Tensor, key: Tensor) -> Tensor:
            together = (segment_T[query] == segment_T[key]) | (parent_T[query] == segment_T[key])
            return together & (position_T[query] >= position_T[key])

        if reach == Reach():
            return seen
        first_T = reach.first(position_T)

        def seen_in_reach(_batch: Any, _head: Any, query: Tensor, key: Tensor) -> Tensor:
            return seen(_batch, _head, query, key) & (first_T[query] <= position_T[key])

        return seen_in_reach


def block_masks(model: PreTrainedModel, rows: PackedRows) -> BlockMask | dict[str, BlockMask]:
    """Return the masks, which leave out blocks that nobody sees; by kind of layer where a model mixes kinds."""

    def make(reach: Reach) -> BlockMask:
        return create_block_mask(rows.sees(reach), None, None, rows.length, rows.length, device=rows.device)

    text: PretrainedConfig = model.config.get_text_config()
    window = getattr(text, "sliding_window", None)
    kinds = set(getattr(text, "layer_types", None) or ())
    if CHUNKED in kinds:
        return {FULL: make(Reach()), CHUNKED: make(Reach(chunk=text.attention_chunk_size))}
    if window is None or kinds == {FULL}:
        return make(Reach())
    return {FULL: make(Reach()), SLIDING: make(Reach(window))} if FULL in kinds else make(Reach(window))
