"""Runs that sample ahead of learning: stopped, resumed, shortened, and with a process lost."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from running import metrics, preset, settings, start, steps_done, train, trained, trajectory, wait_for, workers_of

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm_children")]

SAMPLES = 8 * 4  # of a step: the preset `fake` has 8 prompts × 4 completions
SIX = (
    *settings("run.steps=6", "checkpoint.every=3", "algorithm.mini_batches_per_step=2"),
    *settings("eval.every=2", "eval.prompts=8"),
)


def drop_last_checkpoint(run: Path, copy: Path) -> Path:
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "checkpoints" / "step_000006")
    return copy


def own_prompts(run: Path, samples: int = SAMPLES) -> bool:
    """Whether the shown samples of each step are of that step's own prompts: none was lost, none came twice."""
    shown = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    return all(sample["id"] // samples + 1 == sample["step"] for sample in shown)


def evals(run: Path) -> list[float]:
    return [line["eval/heldout/reward_mean"] for line in metrics(run) if "eval/heldout/reward_mean" in line]


def lose_a_sampler(driver: subprocess.Popen[str], run: Path, *, after: int) -> None:
    """Kill a replica after so many steps; wait until five more are done."""
    wait_for(lambda: steps_done(run) >= after or driver.poll() is not None, 150, f"step {after}")
    workers_of(run)["rollout"][0].kill()
    killed_in = steps_done(run)
    wait_for(lambda: steps_done(run) >= killed_in + 5 or driver.poll() is not None, 150, "steps after the restart")
    assert driver.stdout is not None
    assert driver.poll() is None, driver.stdout.read()


def test_six_steps_are_three_and_three_and_too_old_is_dropped(tmp_path: Path) -> None:
    """Two steps ahead; one step ahead is tried with the real engines below."""
    spec = preset("fake", tmp_path)
    options = (*SIX, "--set", "rollout.max_staleness=2")
    assert "are dropped" not in train(spec, tmp_path / "whole", *options)
    lines = trained(tmp_path / "whole")
    assert [line["rollout/staleness_max"] for line in lines] == [0, 1, 2, 1, 2, 1]
    assert [line["rollout/staleness_mean"] for line in lines] == [0, 1, 2, 1, 2, 1]
    assert all(line["rollout/dropped_stale"] == 0 for line in lines)
    kept = sorted(path.name for path in (tmp_path / "whole" / "checkpoints" / "step_000003" / "driver").iterdir())
    assert kept == ["ahead_000004.safetensors", "ahead_000005.safetensors", "state.json"]
    halves = drop_last_checkpoint(tmp_path / "whole", tmp_path / "halves")
    train(spec, halves, *options, "--resume")
    assert trajectory(halves) == trajectory(tmp_path / "whole")
    assert evals(halves) == evals(tmp_path / "whole")
    shorter = drop_last_checkpoint(tmp_path / "whole", tmp_path / "shorter")
    out = train(spec, shorter, *SIX, "--set", "rollout.max_staleness=1", "--resume")
    assert "rollout.max_staleness: 2 → 1" in out
    assert "32 samples drawn ahead for step 5 are dropped" in out
    after = metrics(shorter)[4:]
    assert [line["rollout/dropped_stale"] for line in after] == [32, 0, 0]
    assert [line["rollout/staleness_max"] for line in after] == [1, 1, 1]
    assert own_prompts(shorter)


def test_what_is_lost_while_both_work(tmp_path: Path) -> None:
    """A sampler comes back and the run goes on; the actor's end is the run's, and it is named with its log alone."""
    spec, run = preset("fake", tmp_path), tmp_path / "run"
    one = settings("rollout.max_staleness=1", "run.steps=100000", "checkpoint.every=9999")
    driver = start("train", spec, "--run-dir", run, *one)
    try:
        lose_a_sampler(driver, run, after=3)
        workers_of(run)["actor"][0].kill()
        output = driver.communicate(timeout=200)[0]
    finally:
        driver.kill()
        driver.communicate()
    assert driver.returncode == 1, output
    assert "rollout rank 0 failed:" in output
    assert "actor rank 0" in output
    assert "SIGKILL" in output
    assert "actor/rank0.log" in output.replace("\n", "")
    assert "Traceback" not in output
    wait_for(lambda: not workers_of(run), 60, "the end of every worker")
    lines = [line for line in metrics(run) if line["step"] > 1]
    assert lines[-1]["rollout/restarts"] == 1
    assert {line["rollout/staleness_max"] for line in lines} <= {0, 1}
    assert own_prompts(run)


def test_the_real_engines_overlap_and_resume_to_the_bit(tmp_path: Path) -> None:
    spec, run = preset("quickstart", tmp_path), tmp_path / "run"
    small = settings("data.prompts_per_step=8", "algorithm.group_size=4")
    options = (*SIX, *small, "--set", "rollout.max_staleness=1")
    train(spec, run, *options)
    lines = trained(run)
    assert [line["rollout/staleness_mean"] for line in lines] == [0, 1, 1, 1, 1, 1]
    assert all(line["sync/verified"] is True for line in lines if "sync/verified" in line)
    assert [line["step"] for line in lines if "sync/verified" in line] == [1, 2, 3, 4, 6]
    overlaps = [(line["rollout/overlap_s"], line["time/update_s"]) for line in lines[:5]]
    assert all(0 <= overlap <= update for overlap, update in overlaps)
    assert any(overlap > 0 for overlap, _ in overlaps), "a quick sampler is done before some updates, never before all"
    assert lines[0]["rollout/logprob_gap"] < 1e-5, "drawn with the weights of now"
    assert all(line["rollout/logprob_gap"] > 1e-4 for line in lines[1:]), "one step of learning lies between"
    assert lines[0]["actor/ratio"] != 1.0
    assert all(line["actor/approx_kl"] > 0 for line in lines)
    halves = drop_last_checkpoint(run, tmp_path / "halves")
    train(spec, halves, *options, "--resume")
    assert trajectory(halves) == trajectory(run)
    assert evals(halves) == evals(run)


def test_weights_reach_what_is_being_drawn(tmp_path: Path) -> None:
    """Many answers in one slot each take longer than an update: syncs meet open requests, as does a lost sampler."""
    spec, run = preset("quickstart", tmp_path), tmp_path / "run"
    small = settings("data.prompts_per_step=8", "algorithm.group_size=16", "data.max_response_tokens=48")
    slow = settings("rollout.engine.max_sequences=1", "rollout.processes=2", "actor.optimizer.lr=1e-4")
    ahead = settings("rollout.in_flight=true", "rollout.max_staleness=2", "run.steps=100000")
    driver = start("train", spec, "--run-dir", run, *small, *slow, *ahead)
    try:
        lose_a_sampler(driver, run, after=4)
    finally:
        driver.kill()
        driver.communicate()
    wait_for(lambda: not workers_of(run), 150, "the end of every worker")
    lines = trained(run)
    assert all(line["sync/verified"] is True for line in lines), "after every step"
    assert lines[-1]["rollout/restarts"] == 1
    assert max(line["rollout/versions_mean"] for line in lines) > 1
    assert {line["rollout/staleness_max"] for line in lines} <= {0, 1, 2}
    assert lines[0]["rollout/logprob_gap"] < 1e-5
    assert own_prompts(run, 8 * 16)
