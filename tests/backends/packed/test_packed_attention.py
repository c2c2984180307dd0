"""Packed rows: every token's log-prob is what it is alone. No sequence sees another, whatever the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from train_helpers import (
    GEMMA2,
    GEMMA3,
    GPT2,
    LLAMA,
    MISTRAL_WINDOW,
    QWEN2,
    assert_same_gradients,
    model_config,
    whole_row,
    write_model,
)

from backends.hf.hf_model import build_model
from backends.packed import packed_attention
from backends.packed.layout import PackedLayout
from backends.packed.packed_attention import Reach, Scoring, use_layout
from backends.packed.packed_input import packed_row
from backends.packed.staging import Staging
from specs.errors import ModelError

LENGTHS = [7, 1, 12, 7, 9, 3]
CASES = [
    ("sdpa", QWEN2),
    ("sdpa", LLAMA),
    ("sdpa", MISTRAL_WINDOW),
    ("sdpa", GPT2),
    ("sdpa", GEMMA3),
    ("eager", QWEN2),
    ("eager", MISTRAL_WINDOW),
    ("eager", GPT2),
    ("eager", GEMMA2),
    ("eager", GEMMA3),
]


def packed_and_single(folder: Path, config: dict[str, Any], implementation: str) -> tuple[Any, torch.Tensor, Any]:
    """The model, packed logits [T, V] by the layout, and the logits of each sequence alone by stock transformers."""
    write_model(folder, config)
    model = build_model(model_config(folder, attn_implementation=implementation), load_weights=True)
    tokens = np.random.default_rng(0).integers(0, config["vocab_size"], sum(LENGTHS))
    row, _ = packed_row(model, Staging(model.device), whole_row(LENGTHS, tokens))
    with row.attending():
        packed = model(**row.inputs).logits[0]
    parts = torch.from_numpy(tokens).split(LENGTHS)
    single = torch.cat([model(input_ids=part[None], use_cache=False).logits[0] for part in parts])
    return model, packed, single


@pytest.mark.parametrize(
    ("implementation", "config"), CASES, ids=lambda x: x if isinstance(x, str) else x["model_type"]
)
def test_packed_equals_one_by_one(tmp_path: Path, implementation: str, config: dict[str, Any]) -> None:
    model, packed, single = packed_and_single(tmp_path, config, implementation)
    torch.testing.assert_close(packed, single, atol=2e-5, rtol=1e-4)
    assert_same_gradients(model, packed, single)


def test_softcap_is_refused_where_it_would_be_ignored(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="softcap"):
        packed_and_single(tmp_path, GEMMA2, "sdpa")


def test_masks_of_the_models_own_are_refused_where_they_would_be_ignored() -> None:
    """Sparse attention combines what it is given with what it chooses."""
    rows = torch.zeros(1, 4, 5, 8)
    layout = PackedLayout([2, 3])
    with use_layout(layout):
        packed_attention.sdpa_by_layout(torch.nn.Module(), rows, rows, rows, layout.mask)
        with pytest.raises(ModelError, match="Module makes masks of its own"):
            packed_attention.sdpa_by_layout(torch.nn.Module(), rows, rows, rows, torch.zeros(1, 1, 5, 5))
        encoder = torch.nn.Module()
        encoder.is_causal = False
        with pytest.raises(ModelError, match="Module sees later tokens"):
            packed_attention.sdpa_by_layout(encoder, rows, rows, rows, layout.mask)


def assert_equals_dense(layout: PackedLayout, seen: torch.Tensor, window: int | None) -> None:
    """Outputs and gradients of `layout` are those of dense attention with the mask `seen` [T, T]."""
    heads, kv_heads, dim = 4, 2, 8
    generator = torch.Generator().manual_seed(0)
    leaves = [
        torch.randn(1, count, len(seen), dim, generator=generator, dtype=torch.float64)
        for count in (heads, kv_heads, kv_heads)
    ]
    results = []
    for packed in (True, False):
        q, k, v = (leaf.clone().requires_grad_() for leaf in leaves)
        if packed:
            out = layout.attend(torch.nn.Module(), q, k, v, Scoring(0.3, Reach(window)))
        else:
            scores = (q @ k.repeat_interleave(2, 1).transpose(2, 3)) * 0.3
            out = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v.repeat_interleave(2, 1)
            out = out.transpose(1, 2)
        out.cos().sum().backward()
        results.append([out.detach(), q.grad, k.grad, v.grad])
    for ours, dense in zip(*results, strict=True):
        torch.testing.assert_close(ours, dense)


@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize(
    ("lengths", "parents"),
    [
        ([4, 3, 3, 3], [-1, 0, 0, 0]),
        ([3, 5, 1, 7, 6, 30, 2, 2], [-1, 0, 0, -1, -1, 4, 4, 4]),
        ([3, 5], [-1, 0]),
        ([6, 2, 2], [-1, -1, 1]),
    ],
)
def test_shared_rows_against_a_dense_mask(lengths: list[int], parents: list[int], window: int | None) -> None:
    total = sum(lengths)
    chains = [([*range(sum(lengths[:p]), sum(lengths[: p + 1]))] if p >= 0 else []) for p in parents]
    seen = torch.zeros(total, total, dtype=torch.bool)
    for i, (length, chain) in enumerate(zip(lengths, chains, strict=True)):
        for row in range(sum(lengths[:i]), sum(lengths[:i]) + length):
            chain.append(row)
            seen[row, chain if window is None else chain[-window:]] = True
    assert_equals_dense(PackedLayout(lengths, parents=parents), seen, window)
