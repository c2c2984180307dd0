"""A micro-batch as the model takes it: one packed row, with what each attention implementation needs to keep
sequences apart."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from backends.attention import use_layout
from backends.packed_layout import PackedLayout


@dataclass(frozen=True)
class Row:
    """One packed row. `attending()` must be entered around forward *and* backward."""

    inputs: dict[str, Any]
    layout: PackedLayout | None

    def attending(self) -> AbstractContextManager[None]:
        return nullcontext() if self.layout is None else use_layout(self.layout)


def can_share_prompts(model: PreTrainedModel) -> bool:
    """Whether several sequences of a row may continue the same rows. The varlen kernels of flash attention want every
    sequence whole."""
    implementation: str = model.config.get_text_config()._attn_implementation
    return implementation in ("sdpa", "eager")


def packed_row(
    model: PreTrainedModel,
    device: torch.device,
    tokens_T: NDArray[np.int64],
    positions_T: NDArray[np.int64],
    lengths: Sequence[int],
    parents: Sequence[int] | None = None,
) -> Row:
    """Inputs of the model's backbone for segments that lie one after another; each may continue an earlier one."""
    text = model.config.get_text_config()
    inputs: dict[str, Any] = {
        "input_ids": torch.from_numpy(tokens_T).to(device)[None],
        "position_ids": torch.from_numpy(positions_T).to(device)[None],
        "use_cache": False,  # with a cache, transformers forgets that the row is packed
    }
    if text._attn_implementation == "sdpa":
        layout = PackedLayout(lengths, device, parents)
        return Row({**inputs, "attention_mask": layout.mask}, layout)
    if text._attn_implementation == "eager":
        return Row({**inputs, "attention_mask": _eager_masks(model, device, positions_T, lengths, parents)}, None)
    assert text._attn_implementation == "flash_attention_2", text._attn_implementation
    assert parents is None or max(parents) < 0, "can_share_prompts"
    ends = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=device)
    longest = max(lengths)
    varlen = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}
    return Row({**inputs, "attention_mask": None, **varlen}, None)


def _eager_masks(
    model: PreTrainedModel,
    device: torch.device,
    positions_T: NDArray[np.int64],
    lengths: Sequence[int],
    parents: Sequence[int] | None,
) -> Tensor | dict[str, Tensor]:
    """Additive masks [1, 1, T, T]: one, or one per kind of layer where a model mixes full and sliding attention."""
    text = model.config.get_text_config()
    segment_T = np.repeat(np.arange(len(lengths)), lengths)
    parent_T = segment_T if parents is None else np.asarray(parents)[segment_T]
    distance = positions_T[:, None] - positions_T
    seen = ((segment_T[:, None] == segment_T) | (parent_T[:, None] == segment_T)) & (distance >= 0)
    full = _additive(seen, model.dtype, device)
    window = getattr(text, "sliding_window", None)
    kinds = set(getattr(text, "layer_types", None) or ())
    if window is None or kinds == {"full_attention"}:
        return full
    sliding = _additive(seen & (distance < window), model.dtype, device)
    if "full_attention" in kinds:
        return {"full_attention": full, "sliding_attention": sliding}
    return sliding


def _additive(seen: NDArray[np.bool_], dtype: torch.dtype, device: torch.device) -> Tensor:
    mask = torch.zeros(seen.shape, dtype=dtype)
    mask.masked_fill_(~torch.from_numpy(seen), torch.finfo(dtype).min)
    return mask[None, None].to(device)
