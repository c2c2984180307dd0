"""The quickstart's own engines end to end: torch trainer, torch sampler, resume to the bit, a proven export. The same
steps with other numbers of ranks, engines and devices, whose numbers are those of one process on the CPU.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import running
from hub_pushed import pushed_hub, variables
from optional import needs_deepspeed
from running import finish, metrics, preset, settings, trained, trajectory, warm_python
from simulated_device.child import in_every_rank, on_simulated_device

pytestmark = pytest.mark.slow

SMALL = (
    *settings("run.steps=4", "checkpoint.every=2", "data.prompts_per_step=8", "eval.every=2", "eval.prompts=8"),
    *settings("algorithm.group_size=4", "algorithm.mini_batches_per_step=2", "algorithm.kl_coef=0.01"),
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Four steps of the quickstart, small, with a reference and two mini-batches."""
    folder = tmp_path_factory.mktemp("torch")
    spec = preset("quickstart", folder)
    done = running.rlctl("train", spec, "--run-dir", folder / "run", *SMALL)  # each role a process of its own making
    assert done.returncode == 0, done.stdout + done.stderr
    return spec, folder / "run", done.stdout


def test_metrics(finished):
    _, run, _ = finished
    lines = trained(run)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert all(line["rollout/logprob_gap_max"] < 1e-4 for line in lines), "sampler and trainer disagree"
    assert all(line["sync/verified"] is True and line["sync/probe_gap"] < 1e-4 for line in lines)
    assert lines[0]["actor/kl"] < lines[-1]["actor/kl"], "the reference must stay where the actor began"
    assert lines[0]["actor/grad_norm"] > 0
    assert "eval/heldout/reward_mean" in lines[1]


def test_as_built(finished):
    _, run, output = finished
    built = json.loads((run / "as_built.json").read_text())
    assert built.pop("sync")["transport"] == "shm"
    assert {role: ranks[0]["model"] and ranks[0]["model"]["attn_implementation"] for role, ranks in built.items()} == {
        "actor": "sdpa", "ref": "sdpa", "rollout": "sdpa", "reward": None, "data": None
    }  # fmt: skip
    assert built["ref"][0]["model"]["weights_checksum"] == built["actor"][0]["model"]["weights_checksum"] != ""
    assert "Qwen2 tiny-digits" in output


def test_resume_is_exact_where_the_roles_take_turns_too(finished, tmp_path):
    spec, run, _ = finished
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "checkpoints" / "step_000004")
    again = finish("train", spec, "--run-dir", copy, *SMALL, "--resume", "--set", "run.colocate=always")
    assert "step_000002" in again.stdout
    assert trajectory(copy) == trajectory(run)
    for line in metrics(copy)[-2:]:
        for role in ("actor", "ref"):
            held = [line[f"mem/{role}_{what}_GiB"] for what in ("before_offload", "offloaded", "onloaded")]
            assert all(0.05 < GiB < 8 for GiB in held), held


def test_two_ranks_that_share_samples_train_the_same(finished, tmp_path):
    """All that a step says of learning and sampling, counts too, is what one rank says; the reference has one rank."""
    spec, run, _ = finished
    shared = ("actor.processes=2", "actor.launcher=torchrun", "actor.sequence_parallel=2", "ref={}", "run.steps=2")
    done = finish(
        "train", spec, "--run-dir", tmp_path / "run", *SMALL, *(word for s in shared for word in ("--set", s))
    )
    assert "sequence 2" in done.stdout
    built = json.loads((tmp_path / "run" / "as_built.json").read_text())
    assert [rank["model"]["mesh"] for rank in built["actor"]] == [{"sequence": 2}] * 2
    assert [rank["model"]["mesh"] for rank in built["ref"]] == [{}]
    one = [line for line in metrics(run) if 0 < line["step"] <= 2]
    two = trained(tmp_path / "run")
    for a, b in zip(one, two, strict=True):
        told = [key for key in a if not key.startswith(("time/", "mem/", "perf/", "sync/", "eval/"))]
        assert len(told) > 20
        for key in told:
            assert b[key] == pytest.approx(a[key], rel=1e-3, abs=1e-5), key
        assert b["perf/micro_batches"] == a["perf/micro_batches"] == 2


def test_export_loads_and_generates(finished, tmp_path):
    spec, run, _ = finished
    out = tmp_path / "exported"
    with pushed_hub() as hub:
        # Not in a fork: huggingface_hub reads its endpoint once, when it is imported.
        done = running.rlctl("export-checkpoint", run, out, "--push-to-hub", "mine", **variables(hub))
    assert done.returncode == 0, done.stdout + done.stderr
    unnamed = running.rlctl("export-checkpoint", run, tmp_path / "unnamed", "--push-to-hub", "")
    assert (unnamed.returncode, (tmp_path / "unnamed").exists()) == (2, False), "an empty variable is no name"
    assert hub.repos["me/mine"].files == {path.name: path.read_bytes() for path in out.iterdir()}
    assert hub.repos["me/mine"].private
    assert "greedy tokens the same" in done.stdout
    assert "in fp32 (as it was trained" in " ".join(done.stdout.split())
    from transformers import AutoModelForCausalLM, AutoTokenizer  # as a user would

    model, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    rows = tokenizer("3142>", return_tensors="pt", add_special_tokens=False)
    answer = model.generate(**rows, max_new_tokens=4, do_sample=False)
    assert answer.shape[1] > rows["input_ids"].shape[1]
    assert json.loads((out / "rlctl_export.json").read_text())["step"] == 4
    evaluated(out, spec, metrics(run)[-1], tmp_path)


def evaluated(model, spec, last, folder):
    """`rlctl eval` of the exported model says what the run's last evaluation said."""
    asked = (*settings("eval.prompts=8", "algorithm.kl_coef=0.01"), "--out", folder / "alone")
    done = finish("eval", model, spec, *asked)
    for said in ("prompts × samples", "8 × 1", "mean reward", "term 0, exact_match", "eval heldout  8/8 completions"):
        assert said in done.stdout
    (line,) = metrics(folder / "alone")
    assert {**line, "step": 4} == {key: value for key, value in last.items() if key in line}
    assert json.loads((folder / "alone" / "resolved.json").read_text())["model"]["path"] == str(model)
    assert "ref" not in json.loads((folder / "alone" / "as_built.json").read_text())


def test_another_larger_reference(finished, tmp_path, repo_root):
    """`[ref].model` is really loaded: as_built.json shows its size, and the KL is not zero from the first step on."""
    spec, run, _ = finished
    larger = ("--kind", "digits", "--hidden", "192", "--layers", "3", "--intermediate", "384", "--weights", "7")
    warm_python(repo_root / "scripts" / "tiny_model.py", tmp_path / "larger", *larger)
    reference = settings(f'ref.model="{tmp_path / "larger"}"', "run.steps=1")
    finish("train", spec, "--run-dir", tmp_path / "run", *SMALL, *reference)
    built = json.loads((tmp_path / "run" / "as_built.json").read_text())
    assert built["ref"][0]["model"]["hidden_size"] == 192
    assert built["ref"][0]["model"]["path"] == str(tmp_path / "larger")
    assert built["actor"][0]["model"]["hidden_size"] == 128
    assert metrics(tmp_path / "run")[1]["actor/kl"] > 1e-3
    assert metrics(run)[1]["actor/kl"] < metrics(tmp_path / "run")[1]["actor/kl"]


# ── the model sharded by DeepSpeed ────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def zero3(tmp_path_factory):
    """Two of the steps with the preset zero3-cpu: a model cut across two processes, with a reference that is cut too.
    Taking turns, so that trainers offload and onload in every step."""
    folder = tmp_path_factory.mktemp("zero")
    spec = preset("zero3-cpu", folder)
    finish("train", spec, "--run-dir", folder / "run", *SMALL, *settings("run.steps=2", "run.colocate=always"))
    return spec, folder / "run"


@needs_deepspeed
def test_zero3_trains_what_ddp_trains(finished, zero3):
    """Sampler and trainer agree, and so do the two engines, until differences of rounding sample another token."""
    lines = trained(zero3[1])
    assert [line["step"] for line in lines] == [1, 2]
    assert all(line["rollout/logprob_gap_max"] < 1e-4 and line["sync/verified"] is True for line in lines)
    assert lines[0]["actor/kl"] < lines[-1]["actor/kl"], "the reference must stay where the actor began"
    for ours, theirs in zip(lines, trained(finished[1])[:2], strict=True):
        assert ours["reward/mean"] == pytest.approx(theirs["reward/mean"], abs=1e-6)
        assert ours["actor/grad_norm"] == pytest.approx(theirs["actor/grad_norm"], rel=1e-3)


@needs_deepspeed
def test_actor_and_reference_are_cut_and_start_alike(zero3):
    built = json.loads((zero3[1] / "as_built.json").read_text())
    for role in ("actor", "ref"):
        assert [rank["model"]["mesh"] for rank in built[role]] == [{"shard": 2}] * 2
        assert {rank["model"]["weights_checksum"] for rank in built[role]} == {
            built["actor"][0]["model"]["weights_checksum"]
        }


@needs_deepspeed
def test_dry_run_shows_what_deepspeed_is_told(zero3):
    done = finish("train", zero3[0], "--dry-run", "--set", "actor.optimizer.max_grad_norm=0.5")
    actor = done.stdout.partition("[actor]")[2].partition("  deepspeed\n")[2].partition("\n\n")[0]
    told = json.loads(actor)
    assert (told["gradient_clipping"], told["zero_optimization"]["stage"]) == (0.5, 3)
    assert told["zero_optimization"]["stage3_param_persistence_threshold"] == 0, "the preset's own key"


# ── several simulated GPUs ────────────────────────────────────────────────────────────────────────

ON_GPUS = (
    *settings(*(f"{role}.dtype=fp32" for role in ("actor", "ref", "rollout")), "run.steps=2"),
    *settings(*(f"{role}.processes=2" for role in ("actor", "ref", "rollout"))),
    *settings("actor.devices=[0,1]", "ref.devices=[0,1]", "rollout.devices=[2,3]", "sync.transport=group"),
    *settings("actor.engine.kind=fsdp2", "actor.sequence_parallel=2"),
)


@pytest.mark.timeout(300)
@on_simulated_device
def test_roles_share_two_gpus_and_samplers_have_their_own(finished, tmp_path):
    """Each rank has a device of its own. The actor, whose ranks share samples, and the reference take turns; weights go
    to two samplers by NCCL, whose place gloo takes."""
    spec, on_the_cpu, _ = finished
    run = tmp_path / "run"
    with in_every_rank(tmp_path):
        done = running.rlctl("train", spec, "--run-dir", run, *SMALL, *ON_GPUS, PYTHONPATH=os.environ["PYTHONPATH"])
    assert done.returncode == 0, done.stdout + done.stderr
    for on_cpu, on_gpus in zip(trained(Path(on_the_cpu))[:2], trained(run), strict=True):
        for key in ("reward/mean", "actor/loss", "actor/grad_norm", "actor/kl"):
            assert on_gpus[key] == pytest.approx(on_cpu[key], rel=1e-3, abs=1e-5), key
        assert on_gpus["sync/verified"]
        assert on_gpus["rollout/logprob_gap_max"] < 1e-4
    built = json.loads((run / "as_built.json").read_text())
    gpus = {role: [rank["gpu"] for rank in built[role]] for role in ("actor", "ref", "rollout")}
    assert gpus == {"actor": ["GPU-0", "GPU-1"], "ref": ["GPU-0", "GPU-1"], "rollout": ["GPU-2", "GPU-3"]}
