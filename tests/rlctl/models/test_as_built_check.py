"""As built = as specified: every kind of difference is found and named."""

import json
from importlib.resources import files
from pathlib import Path

import pytest
from train_helpers import QWEN2

from rlctl.models import as_built_check
from rlctl.preflight.expected import models_expected
from rlctl.preflight.machine import checkpoint_bytes
from specs.errors import AsBuiltError
from specs.load.load import load_spec
from specs.schema.rank_groups import built_mesh
from specs.wire.as_built import AsBuilt, ModelBuilt

SHAPE = {
    "path": "/m", "dtype": "fp32", "attn_implementation": "sdpa", "attn_function": "f", "hidden_size": 8, "layers": 2,
    "vocab_size": 16, "tied_embeddings": True, "parameters": 10, "mesh": {},
}  # fmt: skip


def asked(spec):
    """Return what the spec and a `config.json` would say of the models of `good`."""
    learns = {"actor": 10, "ref": 0, "rollout": 0}
    return {
        role: {**SHAPE, "mesh": built_mesh(spec.role(role)), "trainable_parameters": count}
        for role, count in learns.items()
    }


def quickstart(*sets):
    return load_spec(files("specs") / "presets" / "quickstart.toml", sets)


@pytest.fixture
def spec():
    return quickstart("algorithm.kl_coef=0.1", "actor.processes=2", "model.attn_implementation=sdpa")


def report(role, rank=0, engine="ddp", **model):
    built = {
        "model_class": "Qwen2ForCausalLM", "path": "/m", "parameters": 10, "hidden_size": 8,
        "trainable_parameters": 10 if role == "actor" else 0,
        "layers": 2, "vocab_size": 16, "dtype": "fp32", "attn_implementation": "sdpa", "attn_function": "f",
        "tied_embeddings": True, "weights_checksum": "" if role == "rollout" else "aa", **model,
    }  # fmt: skip
    return AsBuilt(
        role=role, rank=rank, world_size=1, host="h", pid=1, python="p", device="cpu", threads=1, engine=engine,
        versions={"torch": "2"}, model=ModelBuilt(**built),
    )  # fmt: skip


def good():
    return {
        "actor": [report("actor", 0), report("actor", 1)],
        "ref": [report("ref", 0), report("ref", 1)],
        "rollout": [report("rollout", engine="torch")],
    }


def test_no_difference(spec):
    assert as_built_check.differences(spec, good(), asked(spec)) == []


@pytest.mark.parametrize(
    ("role", "change", "words"),
    [
        ("actor", {"attn_implementation": "eager"}, "actor rank 1: attn_implementation: expected sdpa, built eager"),
        ("actor", {"path": "/other"}, "actor rank 1: model path: expected /m, built /other"),
        ("ref", {"parameters": 11}, "ref rank 1: parameters: expected 10, built 11"),
        ("ref", {"tied_embeddings": False}, "ref rank 1: tied_embeddings: expected True, built False"),
        ("ref", {"trainable_parameters": 1}, "ref rank 1: trainable_parameters: expected 0, built 1"),
        ("actor", {"attn_function": "g"}, "actor rank 1: attention function: expected f, built g"),
        ("actor", {"kernels": "liger"}, "actor rank 1: kernels (of rank 0 first): expected torch, built liger"),
        (
            "ref",
            {"replaced_modules": {"RMSNorm": 5}},
            "ref rank 1: kernels (of rank 0 first): expected torch, built torch (5 × RMSNorm)",
        ),
        ("actor", {"weights_checksum": "bb"}, "actor rank 1: weights"),
        ("actor", {"engine": "other"}, "actor rank 1: engine: expected ddp, built other"),
    ],
)
def test_each_difference_of_one_rank_is_named(spec, role, change, words):
    reports = good()
    engine = change.pop("engine", "ddp")
    reports[role][1] = report(role, 1, engine, **change)
    found = as_built_check.differences(spec, reports, asked(spec))
    assert words in found[0]
    assert all(line.startswith(f"{role} rank 1: ") for line in found)
    with pytest.raises(AsBuiltError, match="not what the spec asked for"):
        as_built_check.check(spec, reports, asked(spec))


@pytest.mark.parametrize("change", [{"vocab_size": 17}, {"parameters": 9}])
def test_rollout_must_be_the_actors_model(spec, change):
    reports = good()
    reports["rollout"] = [report("rollout", engine="torch", **change)]
    assert "rollout: " in as_built_check.differences(spec, reports, asked(spec))[-1]


def test_ref_must_be_the_actors_start(spec):
    reports = good()
    reports["ref"] = [report("ref", rank, weights_checksum="bb") for rank in range(2)]
    assert "it must start from the actor's weights" in as_built_check.differences(spec, reports, asked(spec))[0]


@pytest.mark.parametrize(
    ("engine", "built", "words"),
    [
        ("fsdp2", {"replicate": 1, "shard": 1}, "ranks along the mesh axis shard: expected 2, built 1"),
        ("fsdp2", {"shard": 2}, "ranks along the mesh axis replicate: expected 1, built 0"),
        ("zero3", {"replicate": 1, "shard": 2}, "ranks along the mesh axis replicate: expected 0, built 1"),
    ],
)
def test_another_mesh_on_one_rank_is_named(engine, built, words):
    spec = quickstart("algorithm.kl_coef=0.1", "actor.processes=2", f"actor.engine.kind={engine}")
    mesh = {"shard": 2} if engine == "zero3" else {"replicate": 1, "shard": 2}
    reports = good()
    for role in ("actor", "ref"):
        reports[role] = [report(role, rank, engine, mesh=mesh) for rank in range(2)]
    assert as_built_check.differences(spec, reports, asked(spec)) == []
    reports["actor"][1] = report("actor", 1, engine, mesh=built)
    assert as_built_check.differences(spec, reports, asked(spec)) == [f"actor rank 1: {words}"]


@pytest.mark.parametrize(("role", "rank"), [("ref", 0), ("actor", 1)])
def test_a_rank_without_a_model_is_named(spec, role, rank):
    reports = good()
    reports[role][rank] = reports[role][rank].model_copy(update={"model": None})
    found = as_built_check.differences(spec, reports, asked(spec))
    assert f"{role} rank {rank}: whether it holds a model: expected True, built False" in found


def test_resume_with_other_starting_weights_is_refused(spec, tmp_path: Path):
    as_built_check.write(good(), tmp_path / "as_built.json")
    earlier = as_built_check.read_starting_weights(tmp_path / "as_built.json")
    assert sorted(earlier) == ["actor", "ref"]
    as_built_check.check_same_start(good(), earlier)
    changed = good()
    changed["ref"] = [report("ref", rank, weights_checksum="cc") for rank in range(2)]
    with pytest.raises(AsBuiltError, match="ref: the starting weights"):
        as_built_check.check_same_start(changed, earlier)


@pytest.mark.parametrize("tied", [True, False])
def test_a_critic_is_expected_without_a_language_model_head(tmp_path, tied):
    """It has the actor's config, ties nothing, and gives one number for each token in place of logits."""
    config = tmp_path / "model" / "config.json"
    config.parent.mkdir()
    config.write_text(json.dumps({**QWEN2, "tie_word_embeddings": tied}))
    spec = quickstart("algorithm.kind=ppo", f"model.path={config.parent}")
    expected = models_expected(spec, tmp_path)
    actor, critic = expected["actor"], expected["critic"]
    width, vocabulary = QWEN2["hidden_size"], QWEN2["vocab_size"]
    assert (actor["tied_embeddings"], critic["tied_embeddings"]) == (tied, False)
    assert (actor["head"], critic["head"]) == ("lm", "score")
    assert critic["parameters"] - actor["parameters"] == width - (0 if tied else vocabulary * width)
    assert critic["trainable_parameters"] == critic["parameters"]
    both = 12 * (actor["parameters"] + critic["parameters"])  # fp32 weights and Adam's moments
    assert checkpoint_bytes(spec, json.loads(config.read_text())) == both
