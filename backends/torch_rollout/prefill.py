"""Prefill: each distinct prompt runs through the model once, whatever the number of its completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from backends.torch_rollout.kv_cache import PromptLayout
from backends.torch_rollout.runner import Forward, packed_positions


@dataclass(frozen=True)
class PromptBlock:
    """Prompts that went through together: their keys and values per layer, and the logits after each.

    Lives as long as one of its prompts still has completions waiting for a slot.
    """

    kept: dict[int, tuple[Tensor, Tensor]]  # layer → [T, KV, D] twice
    logits: Tensor  # [prompts, V]


@dataclass(frozen=True)
class ReadyPrompt:
    """Where one prompt lies in its block."""

    block: PromptBlock
    number: int
    first_row: int
    length: int


def prefill(prompts: Sequence[NDArray[np.int64]], forward: Forward, device: torch.device) -> list[ReadyPrompt]:
    """Run the prompts as one packed row."""
    lengths = [len(prompt) for prompt in prompts]
    ends = np.cumsum(lengths)
    layout = PromptLayout(lengths, device, forward.num_layers)
    tokens_T = torch.from_numpy(np.concatenate(prompts).astype(np.int64)).to(device)
    last = torch.from_numpy(ends - 1).to(device)
    logits = forward(tokens_T, packed_positions(lengths, device), layout, last)
    block = PromptBlock(layout.kept, logits)
    return [
        ReadyPrompt(block, number, int(end) - length, length)
        for number, (end, length) in enumerate(zip(ends, lengths, strict=True))
    ]
