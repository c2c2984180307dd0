"""Weights of another number of experts than `config.json` says: files hold them one by one; and heads of one number."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from corpus import write_weights
from families import FAMILIES

from rlctl.models.hub import HubFile, HubFolder
from rlctl.models.model_tensors import tensors_of_config
from rlctl.models.weight_files import OTHER_CONFIG, hub_weight_problems, weight_problems
from specs.safetensors_header import read_header

CONFIG = FAMILIES["qwen3_moe"].config  # four experts in the second of two layers
LAYER = "model.layers.1.mlp.experts"


@pytest.mark.parametrize("count", [3, 4, 5])
def test_the_experts_of_a_layer_are_counted(tmp_path: Path, count: int) -> None:
    shapes = {f"{LAYER}.{number}.down_proj.weight": (32, 24) for number in range(count)}
    write_weights(tmp_path / "model.safetensors", {"model.layers.0.input_layernorm.weight": (32,), **shapes})
    placed = json.dumps({"weight_map": dict.fromkeys(shapes, "a")}).encode()
    index = HubFile("model.safetensors.index.json", True, placed)
    there = HubFolder("org/moe", {index.name: index, "model.safetensors": HubFile("model.safetensors", False)})
    wrong = (f"{LAYER} holds {count} experts, and config.json says 4", OTHER_CONFIG)
    for found in (weight_problems(tmp_path, CONFIG), hub_weight_problems(there, CONFIG)):
        assert [*found] == ([] if count == 4 else [wrong])


def test_experts_by_other_names(tmp_path: Path) -> None:
    write_weights(
        tmp_path / "model.safetensors", {f"{LAYER}.down_proj.weight{number}": (32, 24) for number in range(4)}
    )
    ((said, hint),) = weight_problems(tmp_path, CONFIG)
    assert (
        said == f"its experts have other names than the model's: {LAYER}.down_proj.weight0 is there, and no .experts.0."
    )
    assert "convert it again" in hint


@pytest.mark.parametrize(("outputs", "wrong"), [(0, ""), (1, ""), (3, "a critic's head has one output")])
def test_a_critic_needs_no_head_in_the_files_and_none_of_another_width(
    tmp_path: Path, outputs: int, wrong: str
) -> None:
    config = {**FAMILIES["llama"].config, "tie_word_embeddings": False}
    known = tensors_of_config(config)
    assert known is not None
    shapes = {one.name: one.shape for one in known.parameters if one.name != "lm_head.weight"}
    shapes |= {"score.weight": (outputs, config["hidden_size"])} if outputs else {}
    write_weights(tmp_path / "model.safetensors", shapes)
    assert "lm_head.weight" in str([*weight_problems(tmp_path, config)])
    assert wrong in str(found := [*weight_problems(tmp_path, config, "value")])
    assert bool(found) == bool(wrong)


def test_a_wide_head_is_called_by_its_role(tmp_path: Path) -> None:
    config = {**FAMILIES["llama"].config, "tie_word_embeddings": False}
    write_weights(tmp_path / "model.safetensors", {"score.weight": (3, config["hidden_size"])})
    ((said, hint),) = weight_problems(tmp_path, config, "reward")
    assert said == "score.weight has shape [3, 32]: a reward model's head has one output"
    assert "num_labels 1" in hint


@pytest.mark.parametrize("same", [True, False])
def test_a_head_beside_an_embedding_that_it_is_tied_to(tmp_path: Path, same: bool) -> None:
    config = {**FAMILIES["llama"].config, "tie_word_embeddings": False}
    known = tensors_of_config(config)
    assert known is not None
    file = tmp_path / "model.safetensors"
    write_weights(file, {one.name: one.shape for one in known.parameters})
    if not same:
        with file.open("r+b") as stream:
            stream.seek(read_header(file).entries["lm_head.weight"].start)
            stream.write(b"\x01")
    found = [*weight_problems(tmp_path, {**config, "tie_word_embeddings": True})]
    wrong = "config.json ties the head to the embedding, and model.safetensors holds another lm_head.weight"
    assert [said for said, _ in found] == ([] if same else [wrong])
    assert [*weight_problems(tmp_path, config)] == []


def test_weights_that_the_model_has_no_place_for_are_named(tmp_path: Path) -> None:
    """The config of a llama over a Qwen2: transformers leaves the biases out without an error."""
    qwen2, llama = FAMILIES["qwen2"].config, {**FAMILIES["qwen2"].config, "model_type": "llama"}
    known = tensors_of_config(qwen2)
    assert known is not None
    write_weights(tmp_path / "model.safetensors", {one.name: one.shape for one in known.parameters})
    assert [*weight_problems(tmp_path, qwen2)] == []
    ((said, hint),) = weight_problems(tmp_path, llama)
    assert "has no place for" in said
    assert "_proj.bias" in said
    assert hint == OTHER_CONFIG


@pytest.mark.parametrize("other", [b"", b"\x01"])
def test_two_shards_that_contradict_one_another(tmp_path: Path, other: bytes) -> None:
    config = {**FAMILIES["llama"].config, "tie_word_embeddings": False}
    known = tensors_of_config(config)
    assert known is not None
    shapes = {one.name: one.shape for one in known.parameters}
    write_weights(tmp_path / "a.safetensors", shapes)
    write_weights(tmp_path / "b.safetensors", {"model.norm.weight": shapes["model.norm.weight"]})
    with (tmp_path / "b.safetensors").open("r+b") as stream:
        stream.seek(read_header(tmp_path / "b.safetensors").entries["model.norm.weight"].start)
        stream.write(other)
    placed = {name: "a.safetensors" for name in shapes} | {"model.norm.weight": "b.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    wrong = "model.norm.weight is in a.safetensors and, with other values, in b.safetensors"
    assert [said for said, _ in weight_problems(tmp_path, config)] == ([wrong] if other else [])
