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
    write_model,
)

from backends.hf.attention_choice import attention_function
from backends.hf.hf_model import build_model
from backends.packed import packed_attention
from backends.packed.layout import PackedLayout, causal_attention
from backends.packed.packed_attention import use_layout
from backends.packed.packed_input import packed_row
from backends.packed.row_ops import RowCopies, copy_rows, take_rows
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
    positions = np.concatenate([np.arange(length) for length in LENGTHS])
    row = packed_row(model, model.device, tokens, positions, LENGTHS)
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


def test_without_the_layout_sequences_do_mix(tmp_path: Path) -> None:
    """The comparison above can fail: a plain causal row lets a sequence see the one before it."""
    write_model(tmp_path, QWEN2)
    model = build_model(model_config(tmp_path), load_weights=True)
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, 23, sum(LENGTHS)))
    mixed = model(input_ids=tokens[None], use_cache=False).logits[0]
    single = torch.cat([model(input_ids=part[None], use_cache=False).logits[0] for part in tokens.split(LENGTHS)])
    assert (mixed - single)[LENGTHS[0] :].abs().max() > 0.05


def test_softcap_is_refused_where_it_would_be_ignored(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="softcap"):
        packed_and_single(tmp_path, GEMMA2, "sdpa")


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
            out = layout.attend(torch.nn.Module(), q, k, v, scaling=0.3, sliding_window=window)
        else:
            scores = (q @ k.repeat_interleave(2, 1).transpose(2, 3)) * 0.3
            out = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v.repeat_interleave(2, 1)
            out = out.transpose(1, 2)
        out.cos().sum().backward()
        results.append([out.detach(), q.grad, k.grad, v.grad])
    for ours, dense in zip(*results, strict=True):
        torch.testing.assert_close(ours, dense)


@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("lengths", [[5], [4, 4], LENGTHS, [40, 2, 2, 39, 11]])
def test_layout_against_a_dense_mask(lengths: list[int], window: int | None) -> None:
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    row = torch.arange(sum(lengths))
    seen = (sequence[:, None] == sequence) & (row[:, None] >= row)
    if window is not None:
        seen &= row[:, None] - row < window
    assert_equals_dense(PackedLayout(lengths), seen, window)


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


def test_layout_is_current_only_inside() -> None:
    outer, inner = PackedLayout([2]), PackedLayout([3])

    with use_layout(outer):
        with use_layout(inner):
            assert packed_attention._current is inner
        assert packed_attention._current is outer
    assert packed_attention._current is None


def test_take_rows_gradient() -> None:
    x = torch.randn(6, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: take_rows(t, torch.tensor([4, 0, 2])), x)


def test_copy_rows_gradient() -> None:
    x = torch.randn(5, 2, 3, dtype=torch.float64, requires_grad=True)
    copies = RowCopies(np.array([3, 0, 3, 1, 3]), 5)
    assert torch.autograd.gradcheck(lambda t: copy_rows(t, copies), x)


def test_sliding_window_sees_exactly_its_width() -> None:
    q = torch.zeros(1, 1, 5, 2)
    v = torch.eye(5)[None, None]
    out = causal_attention(q, q, v[..., :2].contiguous(), None, 2)  # equal scores: a plain mean of what is seen
    assert out[0, 0, 1].tolist() == [0.5, 0.5]
    assert out[0, 0, 2].tolist() == [0.0, 0.5]
    assert out[0, 0, 3].tolist() == [0.0, 0.0]


def test_the_function_really_called_is_named() -> None:
    packed_attention.install()
    assert attention_function("sdpa") == "backends.packed.packed_attention.sdpa_by_layout"
