"""Parameters known from `config.json` alone, against models that transformers builds on the meta device."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from families import FAMILIES
from safetensors.torch import load_file, save_file
from small_spec import raw_spec
from stock_model import write_family
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.initialization import no_init_weights

from backends.hf.adapted_layers import chosen_layers
from rlctl.models.model_check import ModelCheck
from rlctl.models.model_tensors import tensors_of_config, tensors_on_disk
from specs.load.load import spec_from


def shape(
    model_type: str, hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocab: int, **more: Any
) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        **more,
    }


TIED = {"tie_word_embeddings": True}
SMALL = (64, 96, 3, 4, 2, 128)  # hidden, inner, layers, heads, KV heads, vocabulary
# Published sizes are named; the others are small ones of their family, with the keys that change shapes.
CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen2.5-0.5B": shape("qwen2", 896, 4864, 24, 14, 2, 151936, **TIED),
    "Llama-3.2-1B": shape("llama", 2048, 8192, 16, 32, 8, 128256, head_dim=64, **TIED),
    "Qwen3-8B": shape("qwen3", 4096, 12288, 36, 32, 8, 151936, head_dim=128),
    "Mistral-7B": shape("mistral", 4096, 14336, 32, 32, 8, 32768),
    "Mixtral-8x7B": shape("mixtral", 4096, 14336, 32, 32, 8, 32000, num_local_experts=8),
    "Qwen3-30B-A3B": shape(
        "qwen3_moe", 2048, 6144, 48, 32, 4, 151936, head_dim=128, num_experts=128, moe_intermediate_size=768
    ),
    "gemma-2-2b": shape("gemma2", 2304, 9216, 26, 8, 4, 256000, head_dim=256),
    "llama with biases": shape("llama", *SMALL, attention_bias=True, mlp_bias=True),
    "granite": shape("granite", *SMALL, attention_bias=True),
    "smollm3": shape("smollm3", *SMALL, pad_token_id=0),
    "gemma": shape("gemma", *SMALL),
    "gemma3_text": shape("gemma3_text", *SMALL, head_dim=32),
    "qwen3 with its own head size": shape("qwen3", *SMALL, attention_bias=True),
    "qwen2_moe, some layers dense": shape(
        "qwen2_moe", 64, 96, 5, 4, 2, 128, num_experts=4, moe_intermediate_size=48, shared_expert_intermediate_size=80,
        decoder_sparse_step=2, mlp_only_layers=[1],
    ),
    "olmo2": shape("olmo2", *SMALL, pad_token_id=0),
    "phi3": shape("phi3", *SMALL, pad_token_id=0),
}  # fmt: skip


def build(config: dict[str, Any]) -> nn.Module:
    values = dict(config)
    hf_config = AutoConfig.for_model(values.pop("model_type"), **values)
    with torch.device("meta"), no_init_weights():
        model = AutoModelForCausalLM.from_config(hf_config)
    model.tie_weights()
    return model  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", CONFIGS)
def test_every_name_and_shape_is_that_of_the_built_model(name: str) -> None:
    model, known = build(CONFIGS[name]), tensors_of_config(CONFIGS[name])
    assert known is not None
    assert {p.name: p.shape for p in known.parameters} == {n: tuple(p.shape) for n, p in model.named_parameters()}
    assert known.elements == sum(p.numel() for p in model.parameters())
    linear = {n for n, m in model.named_modules() if isinstance(m, nn.Linear) and "lm_head" not in n}
    assert {p.name.removesuffix(".weight") for p in known.parameters if p.linear} == linear


@pytest.mark.parametrize("name", ["Qwen2.5-0.5B", "llama with biases", "Qwen3-30B-A3B"])
def test_below_a_score_layer_too(name: str) -> None:
    """Tied or not, the model that gives scores has no language-model head."""
    values = dict(CONFIGS[name])
    hf_config = AutoConfig.for_model(values.pop("model_type"), **values, num_labels=1)
    with torch.device("meta"), no_init_weights():
        model = AutoModelForSequenceClassification.from_config(hf_config)
    tensors = tensors_of_config(CONFIGS[name])
    assert tensors is not None
    known = tensors.with_score_layer(hf_config.hidden_size)
    assert {p.name: p.shape for p in known.parameters} == {n: tuple(p.shape) for n, p in model.named_parameters()}
    assert known.with_score_layer(hf_config.hidden_size) == known
    assert "score" not in {p.name for p in known.adaptable}


def test_a_family_that_is_not_known_is_read_from_its_files(tmp_path: Path) -> None:
    config = shape("stablelm", *SMALL, tie_word_embeddings=True)
    assert tensors_of_config(config) is None
    assert tensors_on_disk(tmp_path, config) is None
    values = {key: value for key, value in config.items() if key != "model_type"}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("stablelm", **values))
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    known = tensors_on_disk(tmp_path, config)
    assert known is not None
    assert known.elements == sum(p.numel() for p in model.parameters())
    assert {p.layer for p in known.parameters} == {None, 0, 1, 2}


OWN_LAYERS: dict[str, dict[str, Any]] = {
    "granitemoe": shape("granitemoe", *SMALL, num_local_experts=4, num_experts_per_tok=2),
    "nemotron_h": FAMILIES["nemotron_h"].config,
    "gemma3n_text": {
        **shape("gemma3n_text", 32, 48, 2, 4, 2, 32, head_dim=8, hidden_size_per_layer_input=8, laurel_rank=4),
        **{
            "intermediate_size": [48, 48],
            "vocab_size_per_layer_input": 32,
            "num_kv_shared_layers": 0,
            "altup_num_inputs": 2,
        },
        **{"activation_sparsity_pattern": [0.0, 0.0], "layer_types": ["sliding_attention", "full_attention"]},
    },
}


@pytest.mark.parametrize("name", OWN_LAYERS)
def test_layers_that_take_adapters_are_told_by_names_in_the_files(tmp_path: Path, name: str) -> None:
    """Routers do not, and layers outside the decoder's do."""
    values = dict(OWN_LAYERS[name])
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(values.pop("model_type"), **values))
    model.save_pretrained(tmp_path)
    known = tensors_on_disk(tmp_path, OWN_LAYERS[name])
    assert known is not None
    built = [tuple(model.get_submodule(name).weight.shape) for name in chosen_layers(model, ["all-linear"])]
    assert sorted(p.shape for p in known.adaptable) == sorted(built)  # of Nemotron-H, files have names of their own


def quantize(tensors: dict[str, Tensor], method: str) -> dict[str, Tensor]:
    """Give weights of linear layers, or of experts, the form in which they are published, with drawn values."""
    kept = dict(tensors)
    for name, weight in tensors.items():
        if method == "fp8" and name.endswith("proj.weight"):
            scales = torch.ones(-(-weight.shape[0] // 8), -(-weight.shape[1] // 8))
            kept |= {name: weight.to(torch.float8_e4m3fn), f"{name}_scale_inv": scales}
        elif method == "mxfp4" and name.endswith("experts.gate_up_proj"):
            experts, into, out = kept.pop(name).shape
            blocks = experts, out, into // 32
            kept[f"{name}_blocks"] = torch.randint(256, (*blocks, 16), dtype=torch.uint8)
            kept[f"{name}_scales"] = torch.full(blocks, 120, dtype=torch.uint8)
    return kept


@pytest.mark.parametrize(("family", "method"), [("llama", "fp8"), ("gpt_oss", "mxfp4")])
def test_the_copy_of_a_quantized_model_that_the_hint_writes_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, method: str
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = write_family(tmp_path / "model", family)
    weights, config = folder / "model.safetensors", json.loads((folder / "config.json").read_text())
    save_file(quantize(load_file(weights), method), weights, metadata={"format": "pt"})
    config["quantization_config"] = {"quant_method": method, "weight_block_size": [8, 8]}
    (folder / "config.json").write_text(json.dumps(config))
    keys = [f"model.path={folder}", "model.from_scratch=false"]
    (problem,) = ModelCheck(spec_from(raw_spec(), keys), "actor", tmp_path).problems
    assert f"its weights are quantized ({method})" in problem.message
    assert problem.hint is not None
    exec(problem.hint.partition("or a copy: ")[2], {"transformers": transformers})
    for path in folder.glob("tokenizer*"):
        shutil.copy(path, "bf16")
    assert not ModelCheck(spec_from(raw_spec(), [f"model.path={tmp_path}/bf16", keys[1]]), "actor", tmp_path).problems
    assert {tensor.dtype for tensor in load_file("bf16/model.safetensors").values()} == {torch.float32}
