"""A check at build time that this model can be trained the way the engine trains it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from backends.hf.score_layer import has_score_layer
from backends.packed.packed_input import PackedInput, can_share_prompts, packed_row
from backends.packed.row_ops import RowCopies
from backends.packed.staging import Staging
from specs.errors import ModelError

Run = Callable[[PackedInput, RowCopies | None, None], Tensor]
_LENGTHS = (5, 9, 3, 4)
_PARENTS = (-1, -1, 1, 1)  # the last two segments are completions of the second


@torch.no_grad()
def verify_packing(
    run: Run, model: PreTrainedModel, device: torch.device, *, computes_in: torch.dtype | None = None
) -> None:
    """Packed rows and the chunked head must give the logits of the model's own forward pass, one sequence at a time; of
    a model that gives scores, what enters its head must be the same.

    `run` is `Policy.forward` through the engine; all ranks call this together. `computes_in`: precision of the forward
    pass, where that is not the parameters' own. Catches models that mix sequences of a row (state space layers, biases
    that depend on the place in the row) and models whose logits are not simply head(hidden). Raises ModelError.
    """
    vocab = model.config.get_text_config().vocab_size
    tokens_T = np.random.default_rng(0).integers(0, vocab, sum(_LENGTHS))
    parents = _PARENTS if can_share_prompts(model) else [-1] * len(_LENGTHS)
    prefixes = [range(0) if parent < 0 else _rows(parent) for parent in parents]
    positions_T = np.concatenate([len(prefix) + np.arange(n) for prefix, n in zip(prefixes, _LENGTHS, strict=True)])
    staging = Staging(device)
    row = packed_row(model, staging, tokens_T, positions_T, _LENGTHS, parents)
    sequences = [torch.from_numpy(tokens_T[[*prefix, *_rows(i)]]).to(device) for i, prefix in enumerate(prefixes)]
    every_T = RowCopies(np.arange(len(tokens_T)), len(tokens_T), staging.put)
    staging.send()
    try:
        with row.attending():
            ours = run(row, every_T, None)
        with _plain_attention(model):
            single = [
                run(PackedInput({"input_ids": sequence[None], "use_cache": False}, None), None, None)[len(prefix) :]
                for sequence, prefix in zip(sequences, prefixes, strict=True)
            ]
    except (TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        raise ModelError(f"{type(model).__name__} does not run on packed sequences: {error}") from error
    gap = _relative_gap(ours, torch.cat(single))
    what = "hidden states" if has_score_layer(model) else "logits"
    if not gap < (1e-3 if (computes_in or model.dtype) == torch.float32 else 0.1):
        raise ModelError(
            f"{type(model).__name__} gives other {what} on packed sequences than one by one (relative gap {gap:.2g})",
            hint="this architecture is not supported by this engine: it mixes sequences, or its head is special",
        )


@contextmanager
def _plain_attention(model: PreTrainedModel) -> Iterator[None]:
    """What the row is compared with: the model's own attention, but eager for flex_attention, which would compile
    itself anew for each sequence. Their values are the same."""
    config = model.config.get_text_config()
    if config._attn_implementation != "flex_attention":
        yield
        return
    config._attn_implementation = "eager"
    try:
        yield
    finally:
        config._attn_implementation = "flex_attention"


def _rows(segment: int) -> range:
    start = sum(_LENGTHS[:segment])
    return range(start, start + _LENGTHS[segment])


def _relative_gap(ours: Tensor, theirs: Tensor) -> float:
    if ours.shape != theirs.shape:
        return float("inf")
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp_min(1e-6))
