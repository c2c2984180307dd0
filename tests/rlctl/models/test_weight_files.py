"""Headers of weight files against `config.json`: names, shapes, numbers of layers and experts, heads of one number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from corpus import write_weights
from families import FAMILIES
from small_spec import raw_spec
from stock_model import write_family

from rlctl.models.model_check import ModelCheck
from rlctl.models.model_tensors import tensors_of_config, tensors_on_disk
from rlctl.models.weight_files import weight_problems
from specs.load.load import spec_from
from specs.model_shapes import Shape

LLAMA = {**FAMILIES["llama"].config, "tie_word_embeddings": False}


def stored(folder: Path, config: dict[str, Any], **changes: Shape | None) -> None:
    """Write weights of the shapes that a config means; `changes` by the last part of a name, None: left out."""
    known = tensors_of_config(config)
    assert known is not None
    shapes = {one.name: one.shape for one in known.parameters if ".experts." not in one.name}
    for name, shape in changes.items():
        full = next((one for one in shapes if one.endswith(f"{name}.weight")), f"{name}.weight")
        shapes = {**shapes, full: shape} if shape else {one: its for one, its in shapes.items() if one != full}
    write_weights(folder / "model.safetensors", shapes)


def test_missing_and_other_weights_are_named(tmp_path: Path) -> None:
    stored(tmp_path, LLAMA)
    assert [*weight_problems(tmp_path, LLAMA, "lm")] == []
    stored(tmp_path, LLAMA, o_proj=None)
    assert "lacks 1 of the model's" in str([*weight_problems(tmp_path, LLAMA, "lm")])
    stored(tmp_path, LLAMA, o_proj=(3, 5))
    assert "o_proj.weight has shape [3, 5], but config.json means" in str([*weight_problems(tmp_path, LLAMA, "lm")])


def test_a_link_to_nowhere_is_no_weights(tmp_path: Path) -> None:
    stored(tmp_path, LLAMA)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "model.safetensors").rename(tmp_path / "moved")
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "blob")
    found = ModelCheck(spec_from(raw_spec(), [f"model.path={tmp_path}", "model.from_scratch=false"]), "actor", tmp_path)
    assert "model.safetensors cannot be read: No such file" in str(found.problems)


@pytest.mark.parametrize("family", FAMILIES)
def test_files_that_transformers_writes_have_no_problems(tmp_path: Path, family: str) -> None:
    folder = write_family(tmp_path / "model", family)
    assert [*weight_problems(folder, json.loads((folder / "config.json").read_text()), "lm")] == []


def test_weights_that_the_model_has_no_place_for_are_named(tmp_path: Path) -> None:
    """The config of a llama over a Qwen2: transformers leaves the biases out without an error."""
    qwen2 = FAMILIES["qwen2"].config
    stored(tmp_path, qwen2)
    assert [*weight_problems(tmp_path, qwen2, "lm")] == []
    ((message, _),) = weight_problems(tmp_path, {**qwen2, "model_type": "llama"}, "lm")
    assert "has no place for" in message
    assert "_proj.bias" in message


def test_a_model_that_was_saved_without_its_head_is_no_causal_model(tmp_path: Path) -> None:
    known = tensors_of_config(LLAMA)
    assert known is not None
    shapes = {one.name.removeprefix("model."): one.shape for one in known.parameters if one.name != "lm_head.weight"}
    write_weights(tmp_path / "model.safetensors", shapes)
    assert "first lm_head.weight" in str([*weight_problems(tmp_path, LLAMA, "lm")])
    assert [*weight_problems(tmp_path, LLAMA, "value")] == [], "a critic's head is made anew"
    assert "no score.weight" in str([*weight_problems(tmp_path, LLAMA, "reward")]), "a reward model's is not"
    write_weights(tmp_path / "model.safetensors", {**shapes, "score.weight": (3, 32)})
    assert "num_labels 1" in str([*weight_problems(tmp_path, LLAMA, "reward")])


def test_experts_are_counted_as_ernie_names_them(tmp_path: Path) -> None:
    config = {**LLAMA, "model_type": "ernie4_5_moe", "moe_num_experts": 4}
    last = f"model.layers.{LLAMA['num_hidden_layers'] - 1}.mlp.experts"
    write_weights(tmp_path / "model.safetensors", {f"{last}.{number}.up_proj.weight": (4, 4) for number in range(4)})
    assert [*weight_problems(tmp_path, config, "lm")] == []
    ((message, _),) = weight_problems(tmp_path, {**config, "moe_num_experts": 8}, "lm")
    assert "4 experts, and config.json says 8" in message


def test_layers_that_draft_tokens_are_neither_refused_nor_planned(tmp_path: Path) -> None:
    """GLM 4.5 and DeepSeek V3 store one behind their own, Qwen3-Next below `mtp`; transformers builds none."""
    config = {**LLAMA, "model_type": "glm4_moe", "num_nextn_predict_layers": 1}
    layers = LLAMA["num_hidden_layers"]
    own = {f"model.layers.{number}.mlp.up_proj.weight": (64, 32) for number in range(layers)}
    drafting = {f"model.layers.{layers}.eh_proj.weight": (32, 64), f"mtp.layers.{layers}.mlp.up_proj.weight": (64, 32)}
    write_weights(tmp_path / "model.safetensors", own | drafting)
    assert [*weight_problems(tmp_path, config, "lm")] == []
    planned = tensors_on_disk(tmp_path, config)
    assert planned is not None
    assert {one.name for one in planned.parameters} == own.keys()
    assert tensors_on_disk(tmp_path, {"num_hidden_layers": "two"}) is not None, "which the model check reports"
    write_weights(tmp_path / "model.safetensors", own | {f"model.layers.{layers + 1}.mlp.up_proj.weight": (64, 32)})
    assert f"{layers + 2} layers, and config.json says {layers}" in str([*weight_problems(tmp_path, config, "lm")])
