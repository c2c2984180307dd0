"""The preset megatron-cpu end to end, with a critic and a reference: actor and critic are cut across two processes
each, in an interpreter of their own."""

from __future__ import annotations

import json

import pytest
from optional import MEGATRON_PYTHON, needs_megatron
from running import metrics, preset
from running import warm_rlctl as rlctl

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), needs_megatron]

SMALL = {
    "actor.python": MEGATRON_PYTHON,
    "run.colocate": "always",  # it offloads and onloads in every step
    "checkpoint.every": 1,
    "data.prompts_per_step": 8,
    "algorithm.kind": "ppo",
    "algorithm.group_size": 4,
    "algorithm.mini_batches_per_step": 2,
    "algorithm.kl_coef": 0.01,
    "ref.engine.kind": "megatron",
    "ref.python": MEGATRON_PYTHON,
    "eval.every": 2,
    "eval.prompts": 8,
}
SETTINGS = [part for key, value in SMALL.items() for part in ("--set", f"{key}={value}")]
LEARNS = 'optimizer={lr=1e-3, warmup_steps=5, schedule="cosine"}'
MEGATRON = 'engine={kind="megatron", pipeline_parallel=2}'  # the actor's, on another axis
CRITIC = f'processes=2, launcher="torchrun", threads=1, python="{MEGATRON_PYTHON}", {LEARNS}, {MEGATRON}'


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Two steps with the actor on two tensor ranks, the critic in two stages, and the reference whole in one rank."""
    folder = tmp_path_factory.mktemp("megatron")
    spec = preset("megatron-cpu", folder)
    more = ("--set", "run.steps=2", "--set", f"critic={{{CRITIC}}}")
    done = rlctl("train", spec, "--run-dir", folder / "run", *SETTINGS, *more)
    assert done.returncode == 0, done.stdout + done.stderr
    return spec, folder / "run"


def test_it_trains_what_ddp_trains(finished, tmp_path):
    """The preset's own words: another engine by `--set` trains the same, here in the interpreter of the tests."""
    _, run = finished
    lines = [line for line in metrics(run) if line["step"] > 0]
    assert [line["step"] for line in lines] == [1, 2]
    assert all(line["rollout/logprob_gap_max"] < 1e-4 and line["sync/verified"] is True for line in lines)
    plain = preset("megatron-cpu", tmp_path)
    ddp = [f"{role}.{key}" for role in ("actor", "ref") for key in ("engine.kind=ddp", "python=")]
    ddp = [part for change in (*ddp, "run.steps=2") for part in ("--set", change)]
    done = rlctl("train", plain, "--run-dir", tmp_path / "run", *SETTINGS, *ddp)
    assert done.returncode == 0, done.stdout + done.stderr
    for ours, theirs in zip(lines, [line for line in metrics(tmp_path / "run") if line["step"] > 0], strict=True):
        assert ours["reward/mean"] == pytest.approx(theirs["reward/mean"], abs=1e-6)
        for what in ("actor/grad_norm", "critic/grad_norm", "critic/loss"):
            assert ours[what] == pytest.approx(theirs[what], rel=1e-3)


def test_each_rank_says_its_axes(finished):
    _, run = finished
    built = json.loads((run / "as_built.json").read_text())
    of = {role: [rank["model"]["mesh"] for rank in built[role]] for role in ("actor", "critic", "ref")}
    assert of["actor"] == [{"data": 1, "pipeline": 1, "tensor": 2}] * 2
    assert of["critic"] == [{"data": 1, "pipeline": 2, "tensor": 1}] * 2
    assert of["ref"] == [{"data": 1, "pipeline": 1, "tensor": 1}]
    assert {rank["python"] for role in of for rank in built[role]} == {str(MEGATRON_PYTHON)}


def test_its_checkpoint_exports(finished, tmp_path):
    _, run = finished
    done = rlctl("export-checkpoint", run, tmp_path / "exported")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "greedy tokens the same" in " ".join(done.stdout.split())
