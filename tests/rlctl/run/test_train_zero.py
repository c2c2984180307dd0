"""The preset zero3-cpu end to end: a model cut across two processes, with a reference that is cut too."""

from __future__ import annotations

import json

import pytest
from optional import skip_without
from running import finish, preset, settings, trained

pytestmark = pytest.mark.slow

skip_without("deepspeed", "scripts/setup-engine deepspeed installs it")

# Taking turns, so that trainers offload and onload in every step.
SMALL = {
    "run.steps": 2,
    "run.colocate": "always",
    "checkpoint.every": 2,
    "data.prompts_per_step": 8,
    "algorithm.group_size": 4,
    "algorithm.mini_batches_per_step": 2,
    "algorithm.kl_coef": 0.01,
    "eval.every": 2,
    "eval.prompts": 8,
}
SETTINGS = settings(*(f"{key}={value}" for key, value in SMALL.items()))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("zero")
    spec = preset("zero3-cpu", folder)
    finish("train", spec, "--run-dir", folder / "run", *SETTINGS)
    return spec, folder / "run"


def test_it_trains_what_ddp_trains(finished, tmp_path):
    """Sampler and trainer agree, and so do the two engines, until differences of rounding sample another token."""
    _, run = finished
    lines = trained(run)
    assert [line["step"] for line in lines] == [1, 2]
    assert all(line["rollout/logprob_gap_max"] < 1e-4 and line["sync/verified"] is True for line in lines)
    assert lines[0]["actor/kl"] < lines[-1]["actor/kl"], "the reference must stay where the actor began"
    plain = preset("quickstart", tmp_path)
    finish("train", plain, "--run-dir", tmp_path / "run", *SETTINGS)
    for ours, theirs in zip(lines, trained(tmp_path / "run"), strict=True):
        assert ours["reward/mean"] == pytest.approx(theirs["reward/mean"], abs=1e-6)
        assert ours["actor/grad_norm"] == pytest.approx(theirs["actor/grad_norm"], rel=1e-3)


def test_actor_and_reference_are_cut_and_start_alike(finished):
    _, run = finished
    built = json.loads((run / "as_built.json").read_text())
    for role in ("actor", "ref"):
        assert [rank["model"]["mesh"] for rank in built[role]] == [{"shard": 2}] * 2
        assert {rank["model"]["weights_checksum"] for rank in built[role]} == {
            built["actor"][0]["model"]["weights_checksum"]
        }


def test_dry_run_shows_what_deepspeed_is_told(finished):
    spec, _ = finished
    done = finish("train", spec, "--dry-run", "--set", "actor.optimizer.max_grad_norm=0.5")
    actor = done.stdout.partition("[actor]")[2].partition("  deepspeed\n")[2].partition("\n\n")[0]
    told = json.loads(actor)
    assert (told["gradient_clipping"], told["zero_optimization"]["stage"]) == (0.5, 3)
    assert told["zero_optimization"]["stage3_param_persistence_threshold"] == 0, "the preset's own key"
