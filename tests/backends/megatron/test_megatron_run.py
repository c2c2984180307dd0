"""The preset megatron-cpu end to end: an actor cut across two processes, in an interpreter of its own."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import running
from running import metrics, preset
from running import warm_rlctl as rlctl

PYTHON = Path(os.environ.get("RLCTL_MEGATRON_PYTHON", Path(__file__).parents[3] / ".venv-megatron" / "bin" / "python"))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not PYTHON.exists(), reason="scripts/setup-engine megatron makes .venv-megatron"),
]

SMALL = {
    "actor.python": PYTHON,
    "run.colocate": "always",  # it offloads and onloads in every step
    "checkpoint.every": 1,
    "data.prompts_per_step": 8,
    "algorithm.group_size": 4,
    "algorithm.mini_batches_per_step": 2,
    "algorithm.kl_coef": 0.01,
    "eval.every": 3,
    "eval.prompts": 8,
}
SETTINGS = [part for key, value in SMALL.items() for part in ("--set", f"{key}={value}")]
STAGES = ("--set", "actor.engine.tensor_parallel=1", "--set", "actor.engine.pipeline_parallel=2")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Two steps on two tensor ranks, one more in two stages."""
    folder = tmp_path_factory.mktemp("megatron")
    spec = preset("megatron-cpu", folder)
    for steps, more in ((2, ()), (3, ("--resume", *STAGES))):
        how = ("--run-dir", folder / "run", *SETTINGS, "--set", f"run.steps={steps}", *more)
        done = running.rlctl("train", spec, *how)
        assert done.returncode == 0, done.stdout + done.stderr
    return spec, folder / "run"


def test_it_trains_what_ddp_trains(finished, tmp_path):
    """The preset's own words: another engine by `--set` trains the same, here in the interpreter of the tests."""
    _, run = finished
    lines = [line for line in metrics(run) if line["step"] > 0]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line["rollout/logprob_gap_max"] < 1e-4 and line["sync/verified"] is True for line in lines)
    plain = preset("megatron-cpu", tmp_path)
    ddp = ("--set", "actor.engine.kind=ddp", "--set", "actor.python=", "--set", "run.steps=3")
    done = rlctl("train", plain, "--run-dir", tmp_path / "run", *SETTINGS, *ddp)
    assert done.returncode == 0, done.stdout + done.stderr
    for ours, theirs in zip(lines, [line for line in metrics(tmp_path / "run") if line["step"] > 0], strict=True):
        assert ours["reward/mean"] == pytest.approx(theirs["reward/mean"], abs=1e-6)
        assert ours["actor/grad_norm"] == pytest.approx(theirs["actor/grad_norm"], rel=1e-3)


def test_each_rank_says_its_axes(finished):
    _, run = finished
    built = json.loads((run / "as_built.json").read_text())
    meshes = [rank["model"]["mesh"] for rank in built["actor"]]
    assert meshes == [{"data": 1, "pipeline": 2, "tensor": 1}] * 2
    assert {rank["python"] for rank in built["actor"]} == {str(PYTHON)}


def test_its_checkpoint_exports(finished, tmp_path):
    _, run = finished
    done = rlctl("export-checkpoint", run, tmp_path / "exported")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "greedy tokens the same" in " ".join(done.stdout.split())


def test_dry_run_shows_what_megatron_is_told(finished):
    spec, _ = finished
    done = rlctl("train", spec, "--dry-run", "--set", f"actor.python={PYTHON}")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.partition("[actor]")[2].partition("  megatron\n")[2].partition("\n\n")[0])
    assert (told["tensor_model_parallel_size"], told["use_distributed_optimizer"]) == (2, True)
