"""How far the positions of a model reach."""

from __future__ import annotations

from typing import Any

import pytest

from specs.model_facts import mlp_width, model_facts, positions_of, tokens_of_one_rope

YARN = {"rope_type": "yarn", "factor": 4.0}


@pytest.mark.parametrize(
    ("config", "positions"),
    [
        ({}, 0),
        ({"max_position_embeddings": 4096}, 4096),
        ({"max_position_embeddings": 32768, "rope_scaling": {"type": "yarn", "factor": 4.0}}, 131072),
        (
            {"max_position_embeddings": 32768, "rope_parameters": {**YARN, "original_max_position_embeddings": 32768}},
            131072,
        ),
        ({"max_position_embeddings": 2048, "rope_scaling": {"type": "linear", "factor": 2}}, 4096),
        ({"max_position_embeddings": 2048, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, 2048),
        ({"max_position_embeddings": 131072, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 131072),
        ({"text_config": {"max_position_embeddings": 512}}, 512),
    ],
)
def test_positions(config: dict[str, Any], positions: int) -> None:
    assert positions_of(config) == positions


def test_a_longrope_of_one_kind_of_layer_counts() -> None:
    long = {"rope_type": "longrope", "original_max_position_embeddings": 32}
    ropes = {"full_attention": long, "sliding_attention": {"rope_type": "default"}}
    assert tokens_of_one_rope({"rope_parameters": ropes}) == 32


def test_what_gemma_3_leaves_out_of_its_text_config_is_known() -> None:
    """The 4B model is published so."""
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    facts = model_facts({"model_type": "gemma3", "text_config": text})
    assert facts is not None
    shape = facts.heads, facts.kv_heads, facts.head_dim, facts.vocab_size, facts.tied_embeddings
    assert shape == (8, 4, 256, 262208, True)
    scaled = {**text, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    assert positions_of({"model_type": "gemma3", "text_config": scaled}) == 131072  # as transformers' own config says
    assert positions_of({**scaled, "max_position_embeddings": 32768}) == 32768


LAYERS = {"hidden_size": 64, "num_attention_heads": 4}


@pytest.mark.parametrize(
    ("config", "state", "cached"),
    [
        ({"num_hidden_layers": 48, "full_attention_interval": 4, "linear_conv_kernel_dim": 4}, 36, 12),
        ({"num_hidden_layers": 16, "full_attn_idxs": [2, 5, 8, 10, 12, 14], "conv_L_cache": 3}, 10, 6),
        ({"num_hidden_layers": 9, "hybrid_override_pattern": "M-M-M*-ME", "ssm_state_size": 8}, 4, 1),
        ({"layers_block_type": ["mamba", "mlp", "attention", "moe"], "ssm_state_size": 8}, 1, 1),
        ({"num_hidden_layers": 32, "attn_layer_indices": [9, 18, 27], "mamba_d_state": 128}, 29, 3),
        ({"num_hidden_layers": 2, "layer_types": ["attention", "attention"], "mamba_d_state": 128}, 0, 2),  # Granite 4
    ],
)
def test_layers_with_a_state_and_with_a_cache_are_told_apart(config: dict[str, Any], state: int, cached: int) -> None:
    """Qwen3-Next, LFM2 and Nemotron-H are published so, and transformers writes Nemotron-H with them."""
    facts = model_facts({**LAYERS, **config})
    assert facts is not None
    assert (facts.state_layers, facts.cached_layers) == (state, cached)


def test_zambas_names_of_a_state_are_known() -> None:
    sizes = {"n_mamba_heads": 8, "mamba_d_state": 4, "mamba_headdim": 16, "mamba_ngroups": 2, "mamba_d_conv": 3}
    facts = model_facts({**LAYERS, "layers_block_type": ["mamba", "hybrid"], **sizes})
    assert facts is not None
    assert facts.state.size == 8 * 4 * 16 + (2 * 4 * 2 + 8 * 16) * 3


@pytest.mark.parametrize("name", ["num_experts_per_tok", "moe_k", "top_k_experts"])
def test_experts_per_token_under_any_name(name: str) -> None:
    """The last is Gemma 4's: without it no expert was counted in its FLOPs."""
    facts = model_facts({**LAYERS, "num_hidden_layers": 2, "num_experts": 16, name: 8})
    assert facts is not None
    assert facts.experts_per_token == 8


def test_a_number_for_each_layer_is_that_of_the_first() -> None:
    """Hunyuan A13B is published so."""
    config = {**LAYERS, "num_hidden_layers": 2, "num_experts": 9, "moe_topk": [8, 8], "moe_intermediate_size": [32, 32]}
    facts = model_facts(config)
    assert facts is not None
    assert (facts.experts_per_token, facts.expert_size, mlp_width(facts, config)) == (8, 32, 256)
