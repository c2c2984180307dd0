"""One forward pass over a packed row: the Hugging Face model's own modules, under a layout; and prefill by it."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from backends.packed.packed_attention import Layout, use_layout
from backends.packed.state_layers import PromptPlan, has_state_layers, use_rows
from backends.torch_rollout.kv_cache import PromptBlock, PromptLayout, ReadyPrompt
from specs.errors import ModelError


class Forward(Protocol):
    """tokens_T and position_T (int64) through the model → logits [T, V], or [len(keep), V] of the rows `keep`."""

    num_layers: int
    carries_state: bool  # whether some of its layers do

    def __call__(self, tokens_T: Tensor, position_T: Tensor, layout: Layout, keep: Tensor | None = None) -> Tensor: ...

    def release(self) -> None:
        """Let go of the weights' memory: the parameters are about to move."""

    def join(self) -> None:
        """The parameters have new memory."""


class GenericForward:
    """Any causal language model whose attention goes through transformers' AttentionInterface."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.num_layers = model.config.get_text_config().num_hidden_layers
        self.carries_state = has_state_layers(model)
        names = inspect.signature(model.forward).parameters
        if "position_ids" not in names:
            raise ModelError(
                f"{type(model).__name__} takes no position_ids, so sequences cannot be packed",
                hint="the torch rollout engine needs a model with explicit positions",
            )
        self._keeps_rows = "logits_to_keep" in names

    def __call__(self, tokens_T: Tensor, position_T: Tensor, layout: Layout, keep: Tensor | None = None) -> Tensor:
        rows = {} if keep is None or not self._keeps_rows else {"logits_to_keep": keep}
        with use_layout(layout):
            logits: Tensor = self.model(
                input_ids=tokens_T[None],
                position_ids=position_T[None],
                attention_mask=layout.mask,
                use_cache=False,
                **rows,
            ).logits[0]
        return logits if keep is None or self._keeps_rows else logits.index_select(0, keep)

    def release(self) -> None:
        pass

    def join(self) -> None:
        pass


def packed_positions(lengths: list[int], device: torch.device) -> Tensor:
    """position_T of sequences that lie one after another: each starts at 0."""
    return torch.cat([torch.arange(length, device=device) for length in lengths])


def prompt_rows(lengths: list[int], device: torch.device) -> PromptPlan:
    """Return how prompts run that lie one after another, and whose states are kept."""
    return PromptPlan(lengths, lambda array: torch.from_numpy(array).to(device))


def prefill(prompts: Sequence[NDArray[np.int64]], forward: Forward, device: torch.device) -> list[ReadyPrompt]:
    """Run distinct prompts as one packed row, each once, whatever the number of its completions."""
    lengths = [len(prompt) for prompt in prompts]
    ends = np.cumsum(lengths)
    layout = PromptLayout(lengths, device, forward.num_layers)
    tokens_T = torch.from_numpy(np.concatenate(prompts).astype(np.int64)).to(device)
    last = torch.from_numpy(ends - 1).to(device)
    rows = prompt_rows(lengths, device) if forward.carries_state else None
    with use_rows(rows):
        logits = forward(tokens_T, packed_positions(lengths, device), layout, last)
    block = PromptBlock(layout.kept, rows.ended if rows else {}, logits)
    return [
        ReadyPrompt(block, number, int(end) - length, length)
        for number, (end, length) in enumerate(zip(ends, lengths, strict=True))
    ]
