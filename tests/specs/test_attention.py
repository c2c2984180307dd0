"""What a role's attention will be: every limit that is known, `auto` as the best that works, and no wish replaced."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from small_spec import raw_spec

from rlctl.models import hardware
from rlctl.preflight.role_choices import choice_problems, role_attention
from specs.attention import AttentionFacts, Decision, decide, score_changes
from specs.load.load import spec_from
from specs.schema.recipes import RlSpec

FLASH_2 = {"flash-attn": "2.8.3", "torch": "2.13.0"}


def facts(**changes: Any) -> AttentionFacts:
    """An actor in bf16 on an H100 with flash-attn, unless changed."""
    values = {"device": "cuda", "dtype": "bf16", "learns": True, "versions": FLASH_2, "capability": (9, 0)}
    return AttentionFacts(**{**values, "head_dim": 128, "role": "actor", **changes})


CPU = {"device": "cpu", "dtype": "fp32", "capability": None}

# What `auto` becomes, and a part of why.
AUTO = [
    ({}, "flash_attention_2", "the fastest here"),
    ({"capability": None}, "flash_attention_2", "if there is an sm_80 GPU or a newer one"),
    ({"capability": (7, 5)}, "sdpa", "this one is sm_75"),
    ({"versions": {"flash-attn": "2.3.2"}}, "sdpa", "needs flash-attn 2.3.3 for this model, and 2.3.2 is installed"),
    ({"versions": {"torch": "2.13.0", "flash-attn-3": "3.0.0"}}, "sdpa", "needs the package flash-attn"),
    ({"versions": {"kernels": "0.18.2"}}, "sdpa", "flash-attn, which is not installed in actor's interpreter"),
    ({"versions": {"flash-attn": "my.own.build"}}, "flash_attention_2", ""),
    ({"dtype": "fp32"}, "sdpa", "works in bf16 only, and actor is fp32"),
    ({"head_dim": 256}, "flash_attention_2", ""),
    ({"head_dim": 257}, "sdpa", "heads of at most 256, and the model's have 257"),
    (CPU, "sdpa", "needs a GPU, and actor runs on the CPU"),
    ({**CPU, "scores": "softcap"}, "eager", "sdpa does not compute softcap"),
    ({"scores": "softcap"}, "flash_attention_2", ""),
    ({"scores": "softcap", "versions": {"flash-attn": "2.5.9"}}, "eager", "needs flash-attn 2.6.0"),
    ({"scores": "attention sinks"}, "eager", "flash_attention_2 does not compute attention sinks"),
    ({"not_offered": ("sdpa", "flash_attention_2")}, "eager", "not offered by this model's class"),
    ({"decodes": True, "learns": False}, "sdpa", "the torch rollout engine"),
    ({"decodes": True, "learns": False, "scores": "softcap"}, "eager", "sdpa does not compute softcap"),
]


@pytest.mark.parametrize(("changes", "implementation", "why"), AUTO)
def test_auto_is_the_best_that_works_and_says_why(changes: dict[str, Any], implementation: str, why: str) -> None:
    found = decide("auto", facts(**changes))
    assert (found.asked, found.implementation, found.problem) == ("auto", implementation, "")
    assert why in found.why
    assert found.function


# What is asked by name and cannot be had: why, and a part of the hint.
REFUSED = [
    ("flash_attention_2", CPU, "needs a GPU, and actor runs on the CPU", "give actor devices"),
    ("flash_attention_2", {"dtype": "fp32"}, "works in bf16 only, and actor is fp32", 'actor.dtype = "bf16"'),
    ("flash_attention_2", {"capability": (7, 5)}, "needs an sm_80 GPU or a newer one", '"sdpa" or "auto"'),
    ("flash_attention_2", {"head_dim": 512, "scores": "softcap"}, "at most 256", '"eager" or "auto"'),
    ("flash_attention_2", {"versions": {}}, "needs the package flash-attn, which is not", "install it there"),
    ("flash_attention_2", {"versions": {"kernels": "0.18.2"}}, "flash-attn", '"kernels-community/flash-attn2"'),
    ("flash_attention_2", {"versions": {"flash-attn": "2.3.2"}}, "and 2.3.2 is installed", "newer flash-attn"),
    ("flash_attention_2", {"scores": "attention sinks"}, "attention sinks", '"eager" or "auto"'),
    ("flash_attention_3", {}, "needs the package flash-attn-3", "install it there"),
    ("flash_attention_3", {"capability": (8, 0)}, "needs an sm_90 GPU, and this one is sm_80", "auto"),
    ("kernels-community/flash-attn2", {}, "needs the package kernels", "install it there"),
    ("kernels-community/vllm-flash-attn3", {"capability": (10, 0)}, "or a newer one, up to sm_90", "auto"),
    ("flex_attention", CPU, "no backward pass on the CPU, where actor learns", '"sdpa" or "auto"'),
    ("flex_attention", {"head_dim": 8}, "at least 16 on a GPU", "auto"),
    ("flex_attention", {"versions": {"torch": "2.4.1"}}, "needs torch 2.5, and 2.4.1 is installed", "auto"),
    ("flex_attention", {**CPU, "learns": False, "scores": "attention sinks"}, "attention sinks on the CPU", "eager"),
    ("flex_attention", {"not_offered": ("flex_attention",)}, "not offered by this model's class", "auto"),
    ("sdpa", {"scores": "softcap", **CPU}, "does not compute softcap", '"eager" or "auto"'),
    ("flex_attention", {"decodes": True}, "is not what the torch rollout engine", "rollout.attn_implementation"),
    ("flash_attention_2", {"decodes": True}, "decodes with", 'rollout.attn_implementation = "sdpa"'),
    ("flash_attention_2", {"decodes": True, "scores": "softcap"}, "decodes with", '"eager"'),
]


@pytest.mark.parametrize(("asked", "changes", "problem", "hint"), REFUSED)
def test_a_wish_that_cannot_be_had_is_a_problem(asked: str, changes: dict[str, Any], problem: str, hint: str) -> None:
    found = decide(asked, facts(**changes))
    assert problem in found.problem
    assert hint in found.hint
    assert found.implementation == found.asked == asked  # never another


GRANTED = [
    ("eager", {}),
    ("eager", {**CPU, "scores": "softcap"}),
    ("sdpa", CPU),
    ("sdpa", {"decodes": True}),
    ("flash_attention_2", {}),
    ("flash_attention_3", {"versions": {"flash-attn-3": "3.0.0"}}),
    ("kernels-community/vllm-flash-attn3", {"versions": {"kernels": "0.18.2"}, "scores": "attention sinks"}),
    ("flex_attention", {}),
    ("flex_attention", {**CPU, "learns": False}),
]


@pytest.mark.parametrize(("asked", "changes"), GRANTED)
def test_a_wish_that_works_is_granted(asked: str, changes: dict[str, Any]) -> None:
    found = decide(asked, facts(**changes))
    assert (found.implementation, found.problem, found.hint) == (asked, "", "")
    on_cpu = ", unfused on the CPU: slow, for comparisons"
    assert found.why == "as asked" + (on_cpu if asked == "flex_attention" and changes else "")


def test_where_nothing_works_every_reason_is_given() -> None:
    offered = {"not_offered": ("flash_attention_2", "sdpa", "eager")}
    found = decide("auto", facts(**offered, decodes=True))
    assert found.problem.startswith("nothing works: sdpa is not offered by this model's class; eager is")
    assert "another rollout engine" in found.hint


@pytest.mark.parametrize(
    ("config", "changes"),
    [
        ({"model_type": "qwen2"}, ""),
        ({"model_type": "gemma2"}, "softcap"),
        ({"model_type": "gemma2", "attn_logit_softcapping": 50.0}, "softcap"),
        ({"model_type": "gemma2", "attn_logit_softcapping": None}, ""),
        ({"model_type": "gemma3_text", "attn_logit_softcapping": None}, ""),
        ({"model_type": "gpt_oss"}, "attention sinks"),
        ({"model_type": "wrapper", "text_config": {"model_type": "gemma2"}}, "softcap"),
    ],
)
def test_what_a_config_says_of_the_scores(config: dict[str, Any], changes: str) -> None:
    assert score_changes(config) == changes


# ── of a spec ─────────────────────────────────────────────────────────────────────────────────────


def spec(folder: Path, *overrides: str, **config: Any) -> RlSpec:
    """A run with a reference and a model of this config; vLLM samples, so that `model.*` is for the trainers."""
    shape = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 16}
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2", **shape, **config}))
    raw = raw_spec(model={"path": str(folder)}, algorithm={"kl_coef": 0.1}, rollout={"engine": {"kind": "vllm"}})
    return spec_from(raw, list(overrides))


def decision(checked: RlSpec, role: Any, folder: Path) -> Decision:
    found = role_attention(checked, role, folder)
    assert found is not None
    return found


def test_every_role_has_its_own_decision(tmp_path: Path) -> None:
    """flex_attention for a reference that only scores; the actor learns on the CPU and gets what has a gradient."""
    checked = spec(tmp_path, "ref.attn_implementation=flex_attention")
    assert not list(choice_problems(checked, tmp_path))
    assert decision(checked, "actor", tmp_path).implementation == "sdpa"
    assert decision(checked, "ref", tmp_path).implementation == "flex_attention"
    sampler = decision(checked, "rollout", tmp_path)
    assert (sampler.implementation, sampler.problem) == ("", "")
    assert "vllm chooses its attention itself" in sampler.why
    assert role_attention(checked, "reward", tmp_path) is None


def test_the_key_of_a_problem_is_where_the_spec_asks(tmp_path: Path) -> None:
    """A reference without a section of its own is shaped like the actor, and so is its problem."""
    gpus = ("actor.devices=[0]", "actor.dtype=bf16")
    checked = spec(tmp_path, "actor.attn_implementation=flash_attention_2", *gpus)
    (found,) = choice_problems(checked, tmp_path)
    assert found.key == "actor.attn_implementation"
    assert "flash-attn, which is not installed in actor's interpreter" in found.message


def test_the_models_config_counts(tmp_path: Path) -> None:
    checked = spec(tmp_path, "actor.attn_implementation=sdpa", model_type="gemma2")
    (found,) = choice_problems(checked, tmp_path)
    assert "softcap" in found.message
    assert decision(spec(tmp_path, model_type="gemma2"), "actor", tmp_path).implementation == "eager"


def test_the_roles_own_interpreter_and_this_machines_gpu_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for nvidia-smi, and an interpreter whose packages are two empty ones of these names."""
    site = tmp_path / "site"
    for name, version in (("flash_attn", "2.8.3"), ("torch", "2.13.0")):
        about = site / f"{name}-{version}.dist-info"
        about.mkdir(parents=True)
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={site} exec "{Path(__import__("sys").executable)}" "$@"\n')
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text('#!/bin/sh\ncase "$*" in *--id=0,1) echo 9.0; echo 8.6;; *--id=0) echo 9.0;; *) exit 6;; esac\n')
    for file in (python, tool):
        file.chmod(0o755)
    gpus = ("actor.devices=[0]", "actor.dtype=bf16", f"actor.python={python}")
    checked = spec(tmp_path, *gpus)
    monkeypatch.setenv("PATH", "")
    hardware._smi.cache_clear()
    assert "if there is an sm_80 GPU" in decision(checked, "actor", tmp_path).why
    monkeypatch.undo()
    monkeypatch.setenv("PATH", str(tool.parent), prepend=":")
    hardware._smi.cache_clear()
    assert [hardware.gpu_capability(devices) for devices in ((0, 1), (0,), (2,), ())] == [(8, 6), (9, 0), None, None]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,0")  # what a scheduler gave
    assert [hardware.gpu_capability(devices) for devices in ((1,), (0,), (2,))] == [(9, 0), None, None]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    found = decision(checked, "actor", tmp_path)
    assert (found.implementation, found.why) == ("flash_attention_2", "the fastest here")
    hardware._smi.cache_clear()
