"""A run begun on one engine and number of ranks goes on with others, and back: the same steps to tolerance."""

from __future__ import annotations

import shutil

import pytest
from optional import needs_deepspeed
from running import finish, preset, settings, trained

pytestmark = pytest.mark.slow

SMALL = (
    *settings("data.prompts_per_step=8", "algorithm.group_size=4", "algorithm.mini_batches_per_step=2"),
    *settings("eval.every=100", "eval.prompts=8", "checkpoint.every=3", "checkpoint.keep=9"),
    # A large epsilon: with 1e-8 Adam takes the sign of gradients that are zero but for rounding.
    *settings("actor.optimizer.eps=1e-4", 'actor.optimizer.schedule="constant"'),
)
TWO = settings("actor.processes=2", "actor.launcher=torchrun")
ELSEWHERE = {
    "fsdp2": (*TWO, "--set", "actor.engine.kind=fsdp2"),
    "zero3": (*TWO, "--set", "actor.engine.kind=zero3"),
}


def train(spec, run, steps, *options):
    return finish("train", spec, "--run-dir", run, *SMALL, "--set", f"run.steps={steps}", *options)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Six steps of one ddp rank, with checkpoints of steps 3 and 6."""
    folder = tmp_path_factory.mktemp("whole")
    spec = preset("quickstart", folder)
    train(spec, folder / "run", 6)
    return spec, folder / "run"


@needs_deepspeed
@pytest.mark.timeout(600)
def test_there_and_back(whole, tmp_path):
    """Take steps 1-3 on one ddp rank, each further one on two ranks of another engine, 6 on one ddp rank again."""
    spec, run = whole
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "checkpoints" / "step_000006")
    for step, (engine, changes) in enumerate(ELSEWHERE.items(), start=4):
        there = train(spec, copy, step, "--resume", *changes)
        assert f"step_{step - 1:06d}" in there.stdout, engine
        written = sorted(path.name for path in (copy / "checkpoints" / f"step_{step:06d}" / "actor").glob("model-*"))
        assert written == ["model-00000-of-00002.safetensors", "model-00001-of-00002.safetensors"], engine
        if step == 4:
            assert "resumed with another actor.processes: 1 → 2" in there.stdout
    back = train(spec, copy, 6, "--resume")
    assert "step_000005" in back.stdout
    expected, got = (trained(each) for each in (run, copy))
    assert [line["step"] for line in got] == list(range(1, 7))
    for one, other in zip(expected, got, strict=True):
        assert other["reward/mean"] == pytest.approx(one["reward/mean"], abs=1e-6)
        assert other["actor/loss"] == pytest.approx(one["actor/loss"], abs=1e-5)
        assert other["actor/grad_norm"] == pytest.approx(one["actor/grad_norm"], rel=1e-3)
    finish("export-checkpoint", copy, tmp_path / "out", "--step", "5", "--dtype", "fp32", "--shard-GB", "0.001")
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 1
