"""What modules compute is found by calling them: by their numbers, not by their names."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES
from torch import Tensor, nn
from train_helpers import GPT2, model_config, write_model
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from backends.hf.hf_model import build_without_memory
from backends.train.kernels.held_kernels import replaceable
from backends.train.kernels.module_formulas import NormForm, gate_of, norm_form

LLAMA = NormForm(0.0, rounds_first=True)
GEMMA = NormForm(1.0, rounds_first=False)

# Of two layers: norms, gated MLPs, rotations; the form of the norms, and the gate.
FOUND: dict[str, tuple[int, int, int, NormForm, str]] = {
    "qwen2": (5, 2, 2, LLAMA, "silu"),
    "qwen3": (9, 2, 2, LLAMA, "silu"),
    "llama": (5, 2, 2, LLAMA, "silu"),
    "mistral": (5, 2, 2, LLAMA, "silu"),
    "gemma2": (9, 2, 2, GEMMA, "gelu"),
    "gemma3_text": (13, 2, 2, GEMMA, "gelu"),
    "qwen3_moe": (9, 1, 2, LLAMA, "silu"),  # one dense layer; the weights of experts stand in one tensor
}


@pytest.mark.parametrize("family", FOUND)
def test_families_without_memory(family: str, tmp_path: Path) -> None:
    norms, mlps, rotations, form, gate = FOUND[family]
    config = model_config(write_model(tmp_path, FAMILIES[family].config))
    found = [*replaceable(build_without_memory(config))]
    counts = {"RMSNorm": norms, "gated MLP": mlps, "rotation": rotations}
    assert Counter(one.kind for one in found) == Counter(counts)
    assert {one.form for one in found} == {form, gate, None}


def test_a_family_without_any(tmp_path: Path) -> None:
    assert [*replaceable(build_without_memory(model_config(write_model(tmp_path, GPT2))))] == []


def test_where_the_weight_is_met_is_seen_in_bf16() -> None:
    assert norm_form(LlamaRMSNorm(8)) == LLAMA
    assert norm_form(Olmo2RMSNorm(8)) == NormForm(0.0, rounds_first=False)


class Mean(nn.Module):
    """Looks like a norm; `self.variance_epsilon` is not where it belongs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(8)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True)) + self.variance_epsilon


class WithGate(LlamaRMSNorm):
    def forward(self, hidden_states: Tensor, gate: Any = None) -> Tensor:
        return super().forward(hidden_states)


class Mlp(nn.Module):
    def __init__(self, act: str) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(8, 8) for _ in range(3))
        self.act_fn = ACT2FN[act]

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Swapped(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.gate_proj(x) * self.act_fn(self.up_proj(x)))


@pytest.mark.parametrize("module", [Mean(), WithGate(8), nn.LayerNorm(8), nn.Linear(8, 8)])
def test_what_gives_other_numbers_is_no_norm(module: nn.Module) -> None:
    assert norm_form(module) is None


def test_the_activation_is_found_not_taken_for_granted() -> None:
    """Liger's own patch of a Llama takes any activation for SiLU."""
    found = {act: gate_of(Mlp(act)) for act in ("silu", "swish", "gelu_pytorch_tanh", "gelu", "relu")}
    assert found == {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu", "gelu": None, "relu": None}
    assert gate_of(Swapped("silu")) is None
