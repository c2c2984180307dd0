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
from transformers import PretrainedConfig, PreTrainedModel

from backends.attention import PackedLayout, use_layout


@dataclass(frozen=True)
class Row:
    """One packed row. `attending()` must be entered around forward *and* backward."""

    inputs: dict[str, Any]
    layout: PackedLayout | None

    def attending(self) -> AbstractContextManager[None]:
        return nullcontext() if self.layout is None else use_layout(self.layout)


def packed_row(
    model: PreTrainedModel, tokens_T: NDArray[np.int64], positions_T: NDArray[np.int64], lengths: Sequence[int]
) -> Row:
    """Inputs of the model's backbone for sequences that lie one after another."""
    text = model.config.get_text_config()
    device, dtype = model.device, model.dtype
    inputs: dict[str, Any] = {
        "input_ids": torch.from_numpy(tokens_T).to(device)[None],
        "position_ids": torch.from_numpy(positions_T).to(device)[None],
        "use_cache": False,  # with a cache, transformers forgets that the row is packed
    }
    if text._attn_implementation == "sdpa":
        layout = PackedLayout(lengths, device)
        return Row({**inputs, "attention_mask": layout.mask}, layout)
    if text._attn_implementation == "eager":
        return Row({**inputs, "attention_mask": _eager_masks(text, lengths, device, dtype)}, None)
    assert text._attn_implementation == "flash_attention_2", text._attn_implementation
    ends = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=device)
    longest = max(lengths)
    varlen = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}
    return Row({**inputs, "attention_mask": None, **varlen}, None)


def _eager_masks(
    text: PretrainedConfig, lengths: Sequence[int], device: torch.device, dtype: torch.dtype
) -> Tensor | dict[str, Tensor]:
    """Additive masks [1, 1, T, T]: one, or one per kind of layer where a model mixes full and sliding attention."""
    full = _block_mask(lengths, None, device, dtype)
    window = getattr(text, "sliding_window", None)
    kinds = set(getattr(text, "layer_types", None) or ())
    if window is None or kinds == {"full_attention"}:
        return full
    sliding = _block_mask(lengths, window, device, dtype)
    if "full_attention" in kinds:
        return {"full_attention": full, "sliding_attention": sliding}
    return sliding


def _block_mask(lengths: Sequence[int], window: int | None, device: torch.device, dtype: torch.dtype) -> Tensor:
    sequence_T = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    row_T = torch.arange(len(sequence_T))
    seen = (sequence_T[:, None] == sequence_T) & (row_T[:, None] >= row_T)
    if window is not None:
        seen &= row_T[:, None] - row_T < window
    mask = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, torch.finfo(dtype).min)
    return mask[None, None].to(device)
