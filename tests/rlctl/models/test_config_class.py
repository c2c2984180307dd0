"""Model families as the source of transformers has them, read without importing it; compared with the classes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from rlctl.models.config_class import ConfigField, activations, config_class, rope_types
from rlctl.models.kinds import kind_problem

FAMILIES = [
    "qwen2",
    "qwen3",
    "llama",
    "mistral",
    "gemma2",
    "gemma3_text",
    "phi3",
    "gpt2",
    "opt",
    "mixtral",
    "qwen3_moe",
]

ASK = """
import json, sys
from transformers import AutoConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

found = {"activations": sorted(ACT2FN), "rope": sorted(ROPE_INIT_FUNCTIONS)}
for kind in sys.argv[1:]:
    config = AutoConfig.for_model(kind)
    fields = sorted(type(config).__annotations__)
    found[kind] = [fields, config.max_position_embeddings, config.num_attention_heads]
print("SAID " + json.dumps(found))
"""


@pytest.mark.slow
def test_what_is_read_is_what_the_classes_say() -> None:
    done = subprocess.run([sys.executable, "-c", ASK, *FAMILIES], capture_output=True, text=True, check=True)
    said = json.loads(done.stdout.partition("SAID ")[2])
    assert sorted(activations()) == said.pop("activations")
    assert sorted(rope_types()) == sorted([*said.pop("rope"), "default"])
    assert rope_types()["linear"] == {"rope_type", "factor"}
    for kind, (fields, positions, heads) in said.items():
        found = config_class(kind)
        assert found is not None, kind
        assert set(found.fields) <= set(fields), kind
        assert {"vocab_size", "tie_word_embeddings"} <= set(found.fields), kind
        assert found.value({}, "num_attention_heads") == heads, kind
        assert found.value({}, "max_position_embeddings") in (positions, None), kind  # None: a sum, not a literal
        assert found.modeling, kind


def test_names_of_a_family() -> None:
    gpt2 = config_class("gpt2")
    assert gpt2 is not None
    assert gpt2.own_name("hidden_size") == "n_embd"
    assert gpt2.value({"n_positions": 7}, "max_position_embeddings") == 7
    assert gpt2.value({}, "max_position_embeddings") == 1024
    assert config_class("no_such_family") is None
    assert config_class("../../etc") is None


def test_what_a_field_takes() -> None:
    number, size, share = ConfigField((float, int)), ConfigField((int, type(None))), ConfigField((float,))
    assert [number.takes(value) for value in (1, 0.5, "1", True, None)] == [True, True, False, False, False]
    assert [size.takes(value) for value in (1, None, 0.5, False)] == [True, True, False, False]
    assert [share.takes(value) for value in (0.5, 1, None)] == [True, False, False]
    assert ConfigField(()).takes({"anything": 1})
    assert (number.words, size.words, share.words) == ("a number", "a whole number", "a number with a point")


@pytest.mark.parametrize(
    "kind", ["qwen2", "qwen3", "llama", "mistral", "gemma3_text", "phi3", "gpt2", "mixtral", "qwen3_moe"]
)
def test_families_that_are_trained_are_not_refused(kind: str) -> None:
    assert kind_problem({"model_type": kind}, from_scratch=True) is None


def test_a_hybrid_family_without_its_recurrent_layers_is_a_decoder() -> None:
    config = {"model_type": "granitemoehybrid", "layer_types": ["attention", "attention"]}
    assert kind_problem(config, from_scratch=True) is None
    assert kind_problem({**config, "layer_types": ["mamba", "attention"]}, from_scratch=True) is not None


def test_a_head_of_one_number_is_for_families_that_have_one() -> None:
    """In the causal model's folder it is made anew; in a sequence-classification folder it is kept."""
    folder = {"model_type": "qwen2", "architectures": ["Qwen2ForSequenceClassification"]}
    assert "has no language modeling head" in str(kind_problem(folder, from_scratch=False))
    assert kind_problem(folder, from_scratch=False, head="value") is None
    assert kind_problem({**folder, "architectures": ["Qwen2ForCausalLM"]}, from_scratch=False, head="value") is None
    asked = {**folder, "architectures": ["Qwen2ForQuestionAnswering"]}
    assert "Qwen2ForQuestionAnswering" in str(kind_problem(asked, from_scratch=False, head="value"))
    granite = {"model_type": "granite"}
    assert kind_problem(granite, from_scratch=True) is None
    assert "no sequence-classification model" in str(kind_problem(granite, from_scratch=True, head="value"))


@pytest.mark.parametrize(
    ("kind", "layers"),
    [("glm_moe_dsa", "indexed_attention"), ("lfm2", "conv"), ("minimax", "linear_attention")],
)
def test_layers_are_known_where_config_json_does_not_name_them(kind: str, layers: str) -> None:
    """Of families that no other rule finds."""
    wrong, _ = kind_problem({"model_type": kind}, from_scratch=True) or ("", "")
    assert wrong.startswith(f"{kind} has layers of type {layers}")
