"""How far the positions of a model reach."""

from __future__ import annotations

from typing import Any

import pytest

from specs.model_facts import model_facts, positions_of

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


def test_what_gemma_3_leaves_out_of_its_text_config_is_known() -> None:
    """As the 4B model is published."""
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    facts = model_facts({"model_type": "gemma3", "text_config": text})
    assert facts is not None
    shape = facts.heads, facts.kv_heads, facts.head_dim, facts.vocab_size, facts.tied_embeddings
    assert shape == (8, 4, 256, 262208, True)
