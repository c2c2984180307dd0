"""LoRA end to end: no reference process, merged weights in the sampler, both kinds of export, proven."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from running import finish, preset, settings, trained, warm_python, warm_rlctl

pytestmark = pytest.mark.slow

LORA = (
    *settings("run.steps=3", "checkpoint.every=3", "data.prompts_per_step=8", "eval.every=3", "eval.prompts=8"),
    *settings("algorithm.group_size=4", "algorithm.mini_batches_per_step=2", "algorithm.kl_coef=0.01"),
    *settings('algorithm.kl_in="reward"', "model.from_scratch=false", "actor.lora.rank=8"),
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, repo_root: Path):
    folder = tmp_path_factory.mktemp("lora")
    warm_python(repo_root / "scripts" / "tiny_model.py", folder / "model", "--kind", "digits", "--weights", "7")
    spec = preset("quickstart", folder)
    model = settings(f'model.path="{folder / "model"}"')
    finish("train", spec, "--run-dir", folder / "run", *LORA, *model)
    return spec, folder / "run", model


def test_the_reference_is_the_actor_without_adapters(finished):
    _, run, _ = finished
    built = json.loads((run / "as_built.json").read_text())
    assert "ref" not in built
    assert 0 < built["actor"][0]["model"]["trainable_parameters"] < built["actor"][0]["model"]["parameters"]
    assert built["rollout"][0]["model"]["parameters"] == built["actor"][0]["model"]["parameters"]
    lines = trained(run)
    assert 0 <= lines[0]["actor/kl"] < lines[-1]["actor/kl"], "the reference must stay where the actor began"
    assert all(line["rollout/logprob_gap_max"] < 1e-4 for line in lines), "the sampler has other weights"


@pytest.mark.parametrize("only", [False, True], ids=["merged", "adapter-only"])
def test_exports_are_proven(finished, tmp_path, only):
    _, run, _ = finished
    done = finish("export-checkpoint", run, tmp_path / "out", "--dtype", "fp32", *(["--adapter-only"] if only else []))
    assert ("loads in peft" if only else "loads in transformers") in done.stdout
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file() == only
    assert (tmp_path / "out" / "model.safetensors").is_file() != only
    if only:  # the adapters may be pushed: nothing of this machine is in them
        assert "/" not in json.loads((tmp_path / "out" / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert json.loads((tmp_path / "out" / "rlctl_export.json").read_text())["proof"]["greedy_tokens"] > 8


def test_adapters_are_refused_beside_weights_that_they_did_not_learn_beside(finished, tmp_path, repo_root: Path):
    spec, run, _ = finished
    warm_python(repo_root / "scripts" / "tiny_model.py", tmp_path / "model", "--kind", "digits", "--weights", "8")
    other = (*LORA, *settings(f'model.path="{tmp_path / "model"}"', "run.steps=4"))
    for command in (
        ("train", spec, "--run-dir", tmp_path / "fork", "--from", run, *other),
        ("eval", run, spec, "--out", tmp_path / "eval", *other),
    ):
        done = warm_rlctl(*command)
        assert done.returncode == 2
        assert "the actor's adapters learned beside other weights than those at" in done.stderr
