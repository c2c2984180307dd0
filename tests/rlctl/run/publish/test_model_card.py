"""The card says what the run did, and nothing of this machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from rlctl.models.paths import BUILTIN_FOLDER
from rlctl.run.publish.model_card import ExportedModel, model_card, public_name

PROOF = {"tensors": 3, "values": 0, "greedy_tokens": 32}
SPEC = {
    "run": {"seed": 0},
    "data": {"train": "openai/gsm8k", "prompts_per_step": 8},
    "algorithm": {"kind": "grpo", "group_size": 4, "kl_coef": 0.0},
    "reward": {"terms": [{"kind": "function", "path": "/home/me/secret.py:score"}], "env": {"KEY": "secret"}},
    "actor": {"optimizer": {"lr": 1e-6}, "lora": {"rank": 8, "alpha": 16.0}},
}


def card(tmp_path: Path, model: str = "Qwen/Qwen2.5-0.5B", made: str = "Qwen2ForCausalLM", **spec: object) -> str:
    (tmp_path / "resolved.json").write_text(json.dumps(SPEC | spec))
    lines = [{"step": step, "reward/mean": step / 10, "eval/test/reward_mean": step / 5} for step in range(1, 5)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [made]}))
    about = {"run": "mine", "model_path": model, "versions": {"torch": "2.13"}}
    return model_card(ExportedModel(tmp_path, 3, about, "actor", "bf16", False, "me/mine"), PROOF, tmp_path)


def test_the_hub_reads_its_head(tmp_path: Path) -> None:
    data = ModelCard(card(tmp_path)).data.to_dict()
    assert data == {
        "base_model": "Qwen/Qwen2.5-0.5B",
        "datasets": ["openai/gsm8k"],
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["rlctl", "reinforcement-learning", "grpo"],
    }


def test_it_says_how_far_the_run_came_by_this_step(tmp_path: Path) -> None:
    text = card(tmp_path)
    assert "| `reward/mean` | 0.100 | 0.300 |" in text  # step 4 is after the checkpoint
    assert "| `eval/test/reward_mean` | 0.200 | 0.600 |" in text
    assert "| completions of each | `4` |" in text
    assert "| LoRA rank | `8` |" in text
    assert 'AutoModelForCausalLM.from_pretrained("me/mine")' in text


def test_a_folder_of_several_models_is_loaded_whole(tmp_path: Path) -> None:
    text = card(tmp_path, made="Mistral3ForConditionalGeneration")  # which AutoModelForCausalLM does not know
    assert 'AutoModelForImageTextToText.from_pretrained("me/mine")' in text


def test_a_data_set_is_named_without_its_configuration(tmp_path: Path) -> None:
    assert ModelCard(card(tmp_path, data={"train": "openai/gsm8k:main"})).data.datasets == ["openai/gsm8k"]


def test_every_source_is_named_and_nothing_that_only_evaluates(tmp_path: Path) -> None:
    sets = [{"path": "a/b:main"}, {"path": "rows.jsonl"}, {"path": "c/d"}]
    assert "| temperature | `0.5` |" in card(tmp_path, rollout={"temperature": 0.5})
    spec = {name: SPEC[name] for name in ("reward", "actor")} | {"rollout": {"temperature": 0.5}}
    (tmp_path / "resolved.json").write_text(json.dumps(spec | {"data": {"train": "", "sets": sets}}))
    about = {"run": "mine", "model_path": "a/b"}
    text = model_card(ExportedModel(tmp_path, 3, about, "actor", "bf16", False, "me/mine"), PROOF, tmp_path)
    assert ModelCard(text).data.datasets == ["a/b", "c/d"]
    assert "| data | `a/b:main, local files, c/d` |" in text
    assert "temperature" not in text
    assert "| reward |" not in text


@pytest.mark.parametrize(("alone", "base"), [(True, None), (False, "a/b")])
def test_adapters_on_the_weights_of_another_run_do_not_name_the_model_that_it_began_with(
    alone: bool, base: str | None, tmp_path: Path
) -> None:
    about = {"run": "mine", "model_path": "/x", "made_from": ["warm, step 3 (sft)", "a/b"]}
    text = model_card(ExportedModel(tmp_path, 3, about, "actor", "bf16", alone, "me/mine"), PROOF, tmp_path)
    assert ModelCard(text).data.base_model == base
    assert "| base model | `warm, step 3 (sft) ← a/b` |" in text


def test_an_evaluation_before_the_checkpoint_says_of_which_step_it_is(tmp_path: Path) -> None:
    lines = [{"step": 2, "reward/mean": 0.2, "eval/test/reward_mean": 0.4}, {"step": 3, "reward/mean": 0.3}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    about = {"run": "mine", "model_path": "a/b"}
    text = model_card(ExportedModel(tmp_path, 3, about, "actor", "bf16", False, "me/mine"), PROOF, tmp_path)
    assert "| `eval/test/reward_mean` | 0.400 | 0.400 (step 2) |" in text
    assert "| `reward/mean` | 0.200 | 0.300 |" in text


def test_nothing_of_this_machine_is_in_it(tmp_path: Path) -> None:
    text = card(tmp_path, str(tmp_path / "base"), data={"train": str(tmp_path / "rows.jsonl")})
    assert str(tmp_path) not in text
    assert "secret" not in text
    assert "| base model | `local files` |" in text
    assert "| data | `local files` |" in text
    assert not {"base_model", "datasets"} & ModelCard(text).data.to_dict().keys()


def test_a_run_directory_that_is_gone_leaves_a_card(tmp_path: Path) -> None:
    about = {"run": "mine", "model_path": "a/b"}
    text = model_card(ExportedModel(tmp_path / "none", 3, about, "actor", "bf16", True, "out"), PROOF, tmp_path)
    assert "AutoPeftModelForCausalLM" in text
    assert ModelCard(text).data.to_dict()["library_name"] == "peft"


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (str(BUILTIN_FOLDER / "tiny-digits"), "builtin:tiny-digits"),
        ("org/name", "org/name"),
        ("./org/name", ""),
        ("data/rows.jsonl", ""),
        ("/a/b", ""),
    ],
)
def test_public_names(path: str, name: str) -> None:
    assert public_name(path) == name
