"""A whole run on several simulated GPUs, whose numbers are those of the CPU: each rank has a device of its own."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from running import finish, preset, rlctl, settings, trained
from simulated_device.child import in_every_rank, on_simulated_device

SMALL = (
    *settings("run.steps=2", "data.prompts_per_step=8", "eval.every=2", "eval.prompts=8", "checkpoint.every=2"),
    *settings("algorithm.mini_batches_per_step=1", "algorithm.kl_coef=0.1"),
    *settings(*(f"{role}.dtype=fp32" for role in ("actor", "ref", "rollout"))),
)
ON_GPUS = (
    *settings(*(f"{role}.processes=2" for role in ("actor", "ref", "rollout"))),
    *settings("actor.devices=[0,1]", "ref.devices=[0,1]", "rollout.devices=[2,3]", "sync.transport=group"),
    *settings("actor.engine.kind=fsdp2", "actor.sequence_parallel=2"),
)


@pytest.fixture
def on_the_cpu(tmp_path: Path) -> None:
    """The same run in the folder `cpu`."""
    finish("train", preset("quickstart", tmp_path), "--run-dir", tmp_path / "cpu", *SMALL)


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("on_the_cpu")
@on_simulated_device
def test_roles_share_two_gpus_and_samplers_have_their_own(tmp_path: Path) -> None:
    """The actor, whose ranks share samples, and the reference take turns; weights go to two samplers by NCCL, whose
    place gloo takes."""
    options = ("--run-dir", tmp_path / "gpus", *SMALL, *ON_GPUS)
    with in_every_rank(tmp_path):
        done = rlctl("train", tmp_path / "quickstart.toml", *options, PYTHONPATH=os.environ["PYTHONPATH"])
    assert done.returncode == 0, done.stdout + done.stderr
    both = (trained(tmp_path / place) for place in ("cpu", "gpus"))
    for on_cpu, on_gpus in zip(*both, strict=True):
        for key in ("reward/mean", "actor/loss", "actor/grad_norm", "actor/kl"):
            assert on_gpus[key] == pytest.approx(on_cpu[key], rel=1e-3, abs=1e-5), key
        assert on_gpus["sync/verified"]
        assert on_gpus["rollout/logprob_gap_max"] < 1e-4
    built = json.loads((tmp_path / "gpus" / "as_built.json").read_text())
    gpus = {role: [rank["gpu"] for rank in built[role]] for role in ("actor", "ref", "rollout")}
    assert gpus == {"actor": ["GPU-0", "GPU-1"], "ref": ["GPU-0", "GPU-1"], "rollout": ["GPU-2", "GPU-3"]}
