"""A micro-batch as the model takes it: one packed row, with what each attention implementation needs to keep
sequences apart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import PretrainedConfig, PreTrainedModel

from backends.packed.layout import PackedLayout
from backends.packed.packed_attention import CHUNKED, SLIDING, Reach, use_layout
from backends.packed.packing import MicroBatch
from backends.packed.row_ops import RowCopies
from backends.packed.staging import Staging
from backends.packed.state_layers import SegmentPlan, has_state_layers, use_rows
from backends.ulysses.sequence_group import ALONE, SequenceGroup
from backends.ulysses.split_attention import sharing
from specs.attention import FLASH
from specs.errors import ModelError

_FULL = "full_attention"


@dataclass(frozen=True)
class PackedInput:
    """One packed row, or this rank's part of one that its group shares. `attending()` must be entered around forward
    *and* backward."""

    inputs: dict[str, Any]
    layout: PackedLayout | None
    segments: SegmentPlan | None = None  # of models with layers that carry a state
    unfused: bool = False  # attention by plain operators, where it would else compile itself
    group: SequenceGroup = ALONE  # who share the row: `inputs` are this rank's part, all else is of the whole row

    @contextmanager
    def attending(self) -> Iterator[None]:
        with sharing(self.group), self._layout_in_effect(), use_rows(self.segments):
            yield

    def _layout_in_effect(self) -> AbstractContextManager[Any]:
        if self.unfused:
            stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
            return stance
        return nullcontext() if self.layout is None else use_layout(self.layout)


def can_share_prompts(model: PreTrainedModel) -> bool:
    """Whether several sequences of a row may continue the same rows. The varlen kernels of flash attention want every
    sequence whole."""
    return _implementation(model) not in FLASH


def _implementation(model: PreTrainedModel) -> str:
    name: str = model.config.get_text_config()._attn_implementation
    return name


def packed_row(
    model: PreTrainedModel, staging: Staging, micro: MicroBatch, group: SequenceGroup = ALONE
) -> tuple[PackedInput, RowCopies]:
    """Return what the model's backbone takes of a micro-batch, and how the rows whose targets count are copied from
    what comes out. Both are there when `staging` is sent. Of a row that a group shares they are this rank's part.

    Raises ModelError for an attention that cannot keep sequences apart.
    """
    own_T = slice(None) if group.alone else group.own_rows(micro.num_tokens)
    inputs: dict[str, Any] = {
        "input_ids": staging.put(micro.tokens_T[own_T])[None],
        "position_ids": staging.put(micro.positions_T[own_T])[None],
        "attention_mask": None,
        "use_cache": False,  # with a cache, transformers forgets that the row is packed
    }
    implementation, layout, unfused = _implementation(model), None, False
    if implementation in ("sdpa", "eager"):
        layout = PackedLayout(micro.lengths, staging.device, micro.parents, staging.put)
        inputs["attention_mask"] = layout.mask
    elif implementation in FLASH:
        assert max(micro.parents) < 0, "can_share_prompts"
        inputs |= _varlen(micro.lengths, staging)
    elif implementation == "flex_attention":
        inputs["attention_mask"] = _block_masks(model, micro, staging)
        unfused = staging.device.type == "cpu"  # for some masks torch 2.13 makes C++ that does not compile of it
    else:
        raise ModelError(f"{implementation} attention cannot keep the sequences of a packed row apart")
    segments = SegmentPlan(micro.lengths, micro.parents, staging.put) if has_state_layers(model) else None
    rows_N = RowCopies(micro.hidden_N, micro.num_tokens // group.size, staging.put)
    return PackedInput(inputs, layout, segments, unfused, group), rows_N


def _varlen(lengths: Sequence[int], staging: Staging) -> dict[str, Any]:
    """Where sequences begin and end, as transformers hands it to the kernels. Lengths on the host: no device waits."""
    ends = staging.put(np.array([0, *np.cumsum(lengths)], dtype=np.int32))
    longest = max(lengths)
    return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}


def _block_masks(model: PreTrainedModel, micro: MicroBatch, staging: Staging) -> BlockMask | dict[str, BlockMask]:
    """Return the masks of flex_attention, which leave out blocks that nobody sees; by kind of layer where a model mixes
    kinds. A token sees its own segment and the one that its segment continues, up to itself, in layers with a sliding
    window or with chunks only so far back."""
    number_T = np.repeat(np.arange(len(micro.lengths)), micro.lengths)
    columns = number_T, np.array(micro.parents)[number_T], micro.positions_T
    segment_T, parent_T, position_T = map(staging.put, columns)
    staging.send()  # masks are made of them at once

    # What compares queries with keys must not compute with them first: [T, T] of whole numbers are 8 bytes each.
    def seen(_batch: Any, _head: Any, query: Tensor, key: Tensor) -> Tensor:
        together = (segment_T[query] == segment_T[key]) | (parent_T[query] == segment_T[key])
        return together & (position_T[query] >= position_T[key])

    def make(reach: Reach) -> BlockMask:
        first_T = reach.first(position_T)

        def seen_in_reach(_batch: Any, _head: Any, query: Tensor, key: Tensor) -> Tensor:
            return seen(_batch, _head, query, key) & (first_T[query] <= position_T[key])

        sees, rows = seen if reach == Reach() else seen_in_reach, micro.num_tokens
        return create_block_mask(sees, None, None, rows, rows, device=staging.device)

    text: PretrainedConfig = model.config.get_text_config()
    window = getattr(text, "sliding_window", None)
    kinds = set(getattr(text, "layer_types", None) or ())
    if CHUNKED in kinds:
        return {_FULL: make(Reach()), CHUNKED: make(Reach(chunk=text.attention_chunk_size))}
    if window is None or kinds == {_FULL}:
        return make(Reach())
    return {_FULL: make(Reach()), SLIDING: make(Reach(window))} if _FULL in kinds else make(Reach(window))
