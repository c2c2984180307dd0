"""Packed rows against single sequences: of a model that an engine has made itself, and of one with long windows."""

from __future__ import annotations

from math import nan
from pathlib import Path
from typing import Any

import pytest
import torch
from families import LLAMA_LIKE
from torch import Tensor
from train_helpers import GEMMA3, MISTRAL_WINDOW, build_engine, train_config, write_model

from backends.packed import packed_attention
from backends.packed.packed_attention import Reach
from backends.packed.packing import MicroBatch
from backends.train.verify_packing import verify_own_packing
from specs.errors import ModelError


def sums_of_sequences(micro: MicroBatch) -> Tensor:
    """Of the ids so far, in a segment's own sequence: a causal model that keeps sequences apart."""
    ends: list[float] = []
    found = []
    start = 0
    for length, parent in zip(micro.lengths, micro.parents, strict=True):
        before = 0.0 if parent < 0 else ends[parent]
        sums = before + torch.from_numpy(micro.tokens_T[start : start + length]).cumsum(0).float()
        found.append(sums)
        ends.append(float(sums[-1]))
        start += length
    return torch.cat(found)[torch.from_numpy(micro.hidden_N)]


def sums_of_rows(micro: MicroBatch) -> Tensor:
    return torch.from_numpy(micro.tokens_T).cumsum(0).float()


def test_a_model_that_mixes_the_sequences_of_a_row_is_refused() -> None:
    verify_own_packing(sums_of_sequences, "A", vocabulary=9, dtype=torch.float32, scores=False)
    with pytest.raises(ModelError, match=r"A gives other logits on packed sequences than one by one"):
        verify_own_packing(sums_of_rows, "A", vocabulary=9, dtype=torch.float32, scores=False)
    with pytest.raises(ModelError, match=r"A gives logits that are not finite") as caught:
        verify_own_packing(lambda row: sums_of_rows(row) * nan, "A", vocabulary=9, dtype=torch.float32, scores=False)
    assert "weights" in caught.value.hint, "the model is not to blame for its architecture"


# Longer than any sequence that a start tries.
WINDOW = {"sliding_window": 100, "max_position_embeddings": 128}
# Its layers do not hand the window on: it is that of their kind.
QWEN2_MOE: dict[str, Any] = {
    **LLAMA_LIKE,
    **WINDOW,
    "model_type": "qwen2_moe",
    "use_sliding_window": True,
    "max_window_layers": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
}


def build(folder: Path, config: dict[str, Any], attention: str) -> Any:
    return build_engine(train_config(write_model(folder, config), model={"attn_implementation": attention}))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_window_that_attention_does_not_know_is_refused_however_long_it_is(
    tmp_path: Path, attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build(tmp_path, QWEN2_MOE, attention)
    assert engine.policy.model.config.sliding_window == 100, "windows are what they were"
    monkeypatch.setattr(packed_attention, "_reach", lambda module, kwargs: Reach())
    with pytest.raises(ModelError, match=r"Qwen2MoeForCausalLM gives other logits on packed sequences"):
        build(tmp_path, QWEN2_MOE, attention)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("config", [MISTRAL_WINDOW, GEMMA3], ids=lambda config: config["model_type"])
def test_windows_that_attention_is_told_are_taken_whole(tmp_path: Path, config: dict[str, Any], attention: str) -> None:
    model = build(tmp_path, {**config, **WINDOW}, attention).policy.model
    layers = [layer.self_attn for layer in model.base_model.layers]
    found = {getattr(each, "sliding_window", None) for each in (model.config, *layers)}
    assert found - {None} == {100}
