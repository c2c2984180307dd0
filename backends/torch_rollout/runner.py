"""One forward pass over a packed row: the Hugging Face model's own modules, under a layout; and prefill by it."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from backends.packed.packed_attention import Layout, use_layout
from backends.packed.state_layers import PromptPlan, has_state_layers, use_rows
from backends.torch_rollout.kept_prefixes import ContinuedLayout, KeptPrefix
from backends.torch_rollout.kv_cache import PromptBlock, PromptLayout, ReadyPrompt
from specs.errors import ModelError

ROPE_BY_LENGTH = {"dynamic", "longrope"}  # their frequencies change with the longest sequence


class Forward(ABC):
    """tokens_T and position_T (int64) through the model → logits [T, V], or [len(keep), V] of the rows `keep`."""

    num_layers: int
    carries_state: bool  # whether some of its layers do
    keeps_prefixes: bool  # whether a prefix's keys and values are all that later tokens need of it
    capturable: bool  # whether a decode step never asks the device for a value, so that a CUDA graph can hold it

    @abstractmethod
    def __call__(self, tokens_T: Tensor, position_T: Tensor, layout: Layout, keep: Tensor | None = None) -> Tensor: ...

    def release(self) -> None:
        """Let go of the weights' memory: the parameters are about to move."""

    def join(self) -> None:
        """The parameters have new memory."""


class GenericForward(Forward):
    """Any causal language model whose attention goes through transformers' AttentionInterface."""

    capturable = False  # its own code is not known: experts, for one, are counted on the host

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.num_layers = model.config.get_text_config().num_hidden_layers
        self.carries_state = has_state_layers(model)
        ropes = [str(getattr(module, "rope_type", "")) for module in model.modules()]
        by_length = any(kind in rope for rope in ropes for kind in ROPE_BY_LENGTH)
        self.keeps_prefixes = not self.carries_state and not by_length
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


def packed_positions(lengths: list[int], device: torch.device, starts: Sequence[int] = ()) -> Tensor:
    """position_T of sequences that lie one after another: each starts at 0, or at its own of `starts`."""
    each = zip(starts or [0] * len(lengths), lengths, strict=True)
    return torch.cat([torch.arange(start, start + length, device=device) for start, length in each])


def prefill(
    prompts: Sequence[NDArray[np.int64]],
    forward: Forward,
    device: torch.device,
    prefixes: Sequence[KeptPrefix | None] = (),
) -> list[ReadyPrompt]:
    """Run distinct prompts as one packed row, each once, whatever the number of its completions. `prefixes`: what is
    kept of the beginning of each, which is not computed again."""
    wholes = [len(prompt) for prompt in prompts]
    kept = [0 if prefix is None else len(prefix.tokens) for prefix in prefixes] or [0] * len(prompts)
    lengths = [whole - start for whole, start in zip(wholes, kept, strict=True)]
    layout: ContinuedLayout | PromptLayout
    if any(kept):
        layout = ContinuedLayout(prefixes, lengths, device)
    else:
        layout = PromptLayout(lengths, device, forward.num_layers)
    new = [prompt[start:] for prompt, start in zip(prompts, kept, strict=True)]
    tokens_T = torch.from_numpy(np.concatenate(new).astype(np.int64)).to(device)
    last = torch.from_numpy(np.cumsum(lengths) - 1).to(device)
    rows = PromptPlan(lengths, device) if forward.carries_state else None
    with use_rows(rows):
        logits = forward(tokens_T, packed_positions(lengths, device, kept), layout, last)
    block = PromptBlock(layout.kept, rows.ended if rows else {}, logits)
    return [
        ReadyPrompt(block, number, int(end) - whole, whole)
        for number, (end, whole) in enumerate(zip(np.cumsum(wholes), wholes, strict=True))
    ]
