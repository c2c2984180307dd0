"""A check at build time that this model can be trained the way the engine trains it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from backends.hf.attention_choice import attention_modules, functions_called, in_effect
from backends.hf.score_layer import has_score_layer
from backends.packed.packed_input import PackedInput, can_share_prompts, packed_row
from backends.packed.packing import MicroBatch
from backends.packed.row_ops import RowCopies
from backends.packed.staging import Staging
from backends.train.role_group import most_of_any_rank
from backends.ulysses.sequence_group import ALONE, SequenceGroup
from specs.errors import ModelError

Run = Callable[[PackedInput, RowCopies | None, None], Tensor]
_LENGTHS = (5, 7, 3, 4, 3)
_PARENTS = (-1, -1, 1, 1, 0)  # the last three segments are completions of the second and of the first
_WINDOW = 4  # tokens: less than most of these sequences have


@torch.no_grad()
def verify_packing(
    run: Run, model: PreTrainedModel, device: torch.device, dtype: torch.dtype, group: SequenceGroup = ALONE
) -> None:
    """Packed rows and the chunked head must give the logits of the model's own forward pass, each sequence by itself;
    of a model that gives scores, what enters its head must be the same. So must the parts of a row that `group` shares.

    `run` is `Policy.forward` through the engine, which computes in `dtype`; all ranks call this together. Catches
    models that mix sequences of a row (a state that runs on, biases that depend on the place in the row), models whose
    logits are not simply head(hidden), sliding windows that one of the two does not see, and layers outside attention
    that need rows of other ranks. Raises ModelError, of a group on all its ranks.
    """
    whole = _test_row(model.config.get_text_config().vocab_size, share_prompts=can_share_prompts(model))
    with _as_model_errors(model, "packed sequences"), _changed(_short_windows(model)):
        with _changed(_plain_attention(model)):
            expected_T = _one_by_one(whole, lambda tokens_BS: _plainly(run, model, tokens_BS, device))
        ours_T = row_logits(run, model, device, whole)
    _check(ours_T, expected_T, type(model).__name__, _what(model), dtype)
    if group.alone:
        return
    part = whole.part_of(group)
    with _as_model_errors(model, f"rows that {group.size} ranks share"), _changed(_short_windows(model)):
        ours_N = row_logits(run, model, device, part, group)
    gap = most_of_any_rank(_relative_gap(ours_N, expected_T[part.column_N]), device, group.group)
    if not gap < _largest(dtype):
        attention = f"{', '.join(in_effect(model))} attention ({', '.join(functions_called(model))})"
        raise ModelError(
            f"{type(model).__name__} with {attention} gives other {_what(model)} on rows that {group.size} ranks share "
            f"than on whole sequences (relative gap {gap:.2g})",
            hint="set sequence_parallel = 1 for this role: a layer of this model needs more than its rank's rows",
        )


def verify_own_packing(
    logits: Callable[[MicroBatch], Tensor], name: str, *, vocabulary: int, dtype: torch.dtype, scores: bool
) -> None:
    """Do the same as `verify_packing`, for an engine that has a model of its own: its packed rows against single
    sequences that it computes itself. `logits`: at `hidden_N` of a row, or, of a model that gives scores, what enters
    its head."""

    def alone(tokens_T: NDArray[np.int64]) -> Tensor:
        places_T = np.arange(len(tokens_T))
        return logits(MicroBatch([len(tokens_T)], [-1], tokens_T, places_T, places_T, places_T, places_T))

    row = _test_row(vocabulary, share_prompts=True)
    expected_T = _one_by_one(row, lambda tokens_BS: map(alone, tokens_BS))
    _check(logits(row), expected_T, name, "hidden states" if scores else "logits", dtype)


def _check(ours_T: Tensor, expected_T: Tensor, name: str, what: str, dtype: torch.dtype) -> None:
    if not expected_T.isfinite().all():
        hint = "take another copy of the weights: some are NaN or infinite, or too large for this dtype"
        raise ModelError(f"{name} gives {what} that are not finite", hint=hint)
    if not (gap := _relative_gap(ours_T, expected_T)) < _largest(dtype):
        raise ModelError(
            f"{name} gives other {what} on packed sequences than one by one (relative gap {gap:.2g})",
            hint="this architecture is not supported by this engine: it mixes sequences, or its head is special",
        )


def _largest(dtype: torch.dtype) -> float:
    return 1e-3 if dtype == torch.float32 else 0.1


def _what(model: PreTrainedModel) -> str:
    return "hidden states" if has_score_layer(model) else "logits"


@contextmanager
def _as_model_errors(model: PreTrainedModel, rows: str) -> Iterator[None]:
    """Turn an error of a model's code into a ModelError."""
    try:
        yield
    except (TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        raise ModelError(f"{type(model).__name__} does not run on {rows}: {error}") from error


def _test_row(vocabulary: int, *, share_prompts: bool) -> MicroBatch:
    """Some sequences, each of whose tokens counts. `column_N`: places in the row."""
    tokens = sum(_LENGTHS)
    parents = _PARENTS if share_prompts else [-1] * len(_LENGTHS)
    place_T = np.arange(tokens)
    return MicroBatch(
        lengths=list(_LENGTHS),
        parents=list(parents),
        tokens_T=np.random.default_rng(0).integers(0, vocabulary, tokens),
        positions_T=np.concatenate(
            [len(_prefix(parent)) + np.arange(n) for parent, n in zip(parents, _LENGTHS, strict=True)]
        ),
        hidden_N=place_T,
        target_N=place_T,  # nothing is asked of them
        column_N=place_T,
    )


def row_logits(
    run: Run, model: PreTrainedModel, device: torch.device, micro: MicroBatch, group: SequenceGroup = ALONE
) -> Tensor:
    """Logits at `hidden_N` of a row, or of this rank's part of one that its group shares, as training computes them."""
    staging = Staging(device)
    row, rows_N = packed_row(model, staging, micro, group)
    staging.send()
    with row.attending():
        return run(row, rows_N, None)


def _one_by_one(row: MicroBatch, plainly: Callable[[NDArray[np.int64]], Iterable[Tensor]]) -> Tensor:
    """Logits at each token of the row. `plainly`: those of sequences [B, S], each by itself. All are filled up to the
    longest one with tokens of their own, which a causal model does not see before them."""
    places = [[*_prefix(parent), *_rows(i)] for i, parent in enumerate(row.parents)]
    longest = max(map(len, places))
    found = plainly(np.stack([np.resize(row.tokens_T[each], longest) for each in places]))
    ends = zip(found, places, row.lengths, strict=True)
    return torch.cat([logits_S[len(each) - own : len(each)] for logits_S, each, own in ends])


def _plainly(run: Run, model: PreTrainedModel, tokens_BS: NDArray[np.int64], device: torch.device) -> Tensor:
    """Logits of sequences by the model's own forward pass: of all at once, for an engine may gather all weights for it.
    Classifiers of transformers take several only where they have a padding token."""
    tokens = torch.from_numpy(tokens_BS).to(device)
    inputs = tokens.split(1 if has_score_layer(model) else len(tokens))
    return torch.cat([run(PackedInput({"input_ids": each, "use_cache": False}, None), None, None) for each in inputs])


@contextmanager
def _changed(attributes: Sequence[tuple[Any, str, Any]]) -> Iterator[None]:
    """Give attributes other values, and back what they had."""
    before = [(holder, name, getattr(holder, name)) for holder, name, _ in attributes]
    for holder, name, value in attributes:
        setattr(holder, name, value)
    try:
        yield
    finally:
        for holder, name, value in before:
            setattr(holder, name, value)


def _plain_attention(model: PreTrainedModel) -> list[tuple[Any, str, Any]]:
    """Return what switches to that which the row is compared with: the model's own attention, but eager for
    flex_attention, which would compile itself again for each sequence. Their values are the same."""
    config = model.config.get_text_config()
    flexes = config._attn_implementation == "flex_attention"
    return [(config, "_attn_implementation", "eager")] if flexes else []


def _short_windows(model: PreTrainedModel) -> list[tuple[Any, str, Any]]:
    """Return sliding windows, chunks and steps of positions (Llama 4's) that these short sequences outgrow. Masks read
    them from the configuration, layers have them too, and a model may hand them on from one of both alone."""
    text: PretrainedConfig = model.config.get_text_config()
    layers = list(attention_modules(model))
    holders: dict[int, Any] = {id(each): each for each in (text, *(layer.config for layer in layers), *layers)}
    names = ("sliding_window", "attention_chunk_size", "floor_scale")
    found = [(each, name, getattr(each, name, None)) for each in holders.values() for name in names]
    return [(each, name, _WINDOW) for each, name, limit in found if isinstance(limit, int) and limit > _WINDOW]


def _prefix(parent: int) -> range:
    return range(0) if parent < 0 else _rows(parent)


def _rows(segment: int) -> range:
    start = sum(_LENGTHS[:segment])
    return range(start, start + _LENGTHS[segment])


def _relative_gap(ours: Tensor, theirs: Tensor) -> float:
    if ours.shape != theirs.shape:
        return float("inf")
    if not ours.numel():
        return 0.0  # a rank without any of the few rows
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp_min(1e-6))
