"""`check-config --probe`: what roles would build, asked in their own interpreters by real processes."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from optional import VLLM_PYTHON, needs_deepspeed, needs_vllm
from running import REPO, listing, preset
from sabotage import SUPPORT

from rlctl.cli import main

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm_children")]

TINY = REPO / "specs" / "builtin" / "tiny-digits"
HALF_A_BILLION = {  # Qwen2.5-0.5B
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 896, "num_hidden_layers": 24,
    "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936, "intermediate_size": 4864,
    "tie_word_embeddings": True, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
    "eos_token_id": 1, "hidden_act": "silu",
}  # fmt: skip
Found = tuple[int, dict[str, Any], str]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "140")


def probe(capsys: pytest.CaptureFixture[str], spec: Path, *sets: str, target: str = "here") -> Found:
    """Exit code, JSON and standard error."""
    options = [part for key in sets for part in ("--set", key)]
    capsys.readouterr()
    code = main(["check-config", str(spec), "--json", "--probe", "--target", target, *options])
    out, err = capsys.readouterr()
    return code, json.loads(out), err


@needs_deepspeed
def test_a_model_of_half_a_billion_parameters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = preset("quickstart", tmp_path)
    model = tmp_path / "model"
    shutil.copytree(TINY, model)
    (model / "config.json").write_text(json.dumps(HALF_A_BILLION))
    before = listing(tmp_path)
    cut = ("actor.engine.kind=fsdp2", "actor.processes=16", "actor.engine.replicate=2", "actor.dtype=bf16")
    code, found, _ = probe(capsys, spec, f"model.path={model}", "algorithm.kl_coef=0.1", *cut, "ref.engine.kind=zero3")
    assert (code, found["problems"], found["probe"]) == (0, [], True)
    roles = found["roles"]
    assert roles["reward"]["tokenizer_tokens"] == 15
    for role, learns in (("actor", 494_032_768), ("ref", 0), ("rollout", 0)):
        got = roles[role]
        assert got["got"]["path"] == got["model"] == str(model)
        assert got["model_class"] == "Qwen2ForCausalLM"
        assert (got["parameters"], got["trainable_parameters"]) == (494_032_768, learns)
        assert got["attn_implementation"] == got["asked"]["attn_implementation"] == "sdpa"
    assert roles["actor"]["got"]["mesh"] == roles["actor"]["asked"]["mesh"] == {"replicate": 2, "shard": 8}
    assert [roles[role]["dtype"] for role in ("actor", "rollout", "ref")] == ["bf16", "bf16", "fp32"]
    assert roles["ref"]["not_seen"] == ["mesh"], "DeepSpeed cuts only when all ranks are there"
    assert listing(tmp_path) == before, "nothing is written"


def test_what_differs_is_red_and_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An interpreter in which transformers reads another config: seen in that role, and in no other."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text("import sabotage\nsabotage.SABOTAGES['layers']().__enter__()\n")
    spec = preset("quickstart", tmp_path)
    code, found, _ = probe(capsys, spec, f"actor.env.PYTHONPATH={site}{os.pathsep}{SUPPORT}")
    assert (code, found["ok"]) == (2, False)
    assert all(problem["key"] == "actor" and problem["hint"] for problem in found["problems"])
    messages = [problem["message"] for problem in found["problems"]]
    assert "layers: expected 2, built 3" in messages
    assert any(message.startswith("parameters: expected 299904, built ") for message in messages)
    assert found["roles"]["actor"]["asked"]["layers"] == 2
    assert found["roles"]["actor"]["layers"] == 3
    assert found["roles"]["rollout"]["layers"] == 2


def test_a_model_that_is_not_here_is_not_downloaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = preset("quickstart", tmp_path)
    code, found, _ = probe(capsys, spec, "model.path=nobody/never-heard-of-it")
    assert code == 2
    assert {problem["key"] for problem in found["problems"]} == {"actor", "rollout", "data", "reward"}
    assert all("needs the model's config.json" in problem["message"] for problem in found["problems"])
    assert all("hf download nobody/never-heard-of-it" in problem["hint"] for problem in found["problems"])


def test_what_this_machine_lacks_is_a_note_for_a_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lacks = ("reward.python=/of/the/cluster/python", "rollout.python=/of/the/cluster/python")
    lacks += ('tracking=[{kind="mlflow", experiment="e"}]',)
    code, found, _ = probe(capsys, preset("quickstart", tmp_path), *lacks, target="cluster")
    assert (code, found["problems"], found["warnings"], found["probe"]) == (0, [], [], True)
    for role in ("reward", "rollout"):
        assert any(note.startswith(f"not on this machine: {role}: its interpreter") for note in found["notes"])
    assert found["roles"]["actor"]["layers"] == 2


@needs_vllm
def test_vllm_in_its_own_interpreter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    vllm = ("rollout.engine.kind=vllm", f"rollout.python={VLLM_PYTHON}")
    code, found, _ = probe(capsys, preset("quickstart", tmp_path), *vllm)
    assert (code, found["problems"]) == (0, [])
    rollout = found["roles"]["rollout"]
    assert (rollout["model_class"], rollout["parameters"], rollout["dtype"]) == ("Qwen2ForCausalLM", 299_904, "fp32")
    assert set(rollout["not_seen"]) == {"attn_implementation", "attn_function", "mesh"}
    assert "attn_function" not in rollout["got"]


def test_the_person_sees_asked_and_got(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = preset("fake", tmp_path)
    assert main(["check-config", "--probe", str(spec)]) == 0
    out, _ = capsys.readouterr()
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "role built without memory asked got" in lines
    assert "vocab_size 15 15" in lines
