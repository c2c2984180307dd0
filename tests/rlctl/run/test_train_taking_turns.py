"""Whole runs on shared devices: saving, evaluating and sampling in turn, and a sampler that wakes up as another."""

from __future__ import annotations

from running import finish, metrics, preset, settings, trajectory, warm_rlctl
from warm import PATCHES

SHARED = settings('run.colocate="always"')

WAKES_AS_ANOTHER = """
import backends.fake.fake_rollout as m
wake = m.FakeRolloutEngine.wake
def other(self, tags):
    wake(self, tags)
    if "kv_cache" in tags and self._weights:
        self._weights["bigram.weight"] *= 1.5
m.FakeRolloutEngine.wake = other
"""

SAYS_HOW_DEEP = """
import backends.fake.fake_rollout as m
sleep = m.FakeRolloutEngine.sleep
def said(self, level):
    print("asleep at level", level, flush=True)
    sleep(self, level)
m.FakeRolloutEngine.sleep = said
"""


def plot(folder, code):
    """Return the settings under which the rollout runs this code when it starts."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(PATCHES + code)
    return settings(f'rollout.env.PYTHONPATH="{folder}"')


def test_replicas_turns_checkpoints_and_evaluations_change_nothing(tmp_path):
    """To save, the trainer needs the device, and the rollout sleeps: it gets its weights again before it samples. It
    sleeps at level 2, from the first time after the build on: level 1 would keep a copy in host memory for nothing."""
    spec = preset("fake", tmp_path)
    common = settings("run.steps=4", "checkpoint.every=1")
    evaluated = settings("eval={every=2, prompts=8}")
    turns = (*SHARED, *settings("rollout.processes=3"), *plot(tmp_path / "plot", SAYS_HOW_DEEP))
    for name, extra in {"apart": (), "turns": turns}.items():
        finish("train", spec, "--run-dir", tmp_path / name, *common, *evaluated, *extra)
    assert trajectory(tmp_path / "turns") == trajectory(tmp_path / "apart")
    moves = [f"mem/actor_{what}_GiB" for what in ("before_offload", "offloaded", "before_onload", "onloaded")]
    for turns, apart in zip(metrics(tmp_path / "turns"), metrics(tmp_path / "apart"), strict=True):
        assert {key: value for key, value in turns.items() if key.startswith("eval/")} == {
            key: value for key, value in apart.items() if key.startswith("eval/")
        }
        if turns["step"]:
            assert turns["sync/verified"] is True
            assert turns["rollout/logprob_gap"] < 1e-4
            assert all(0.01 < turns[key] < 4 and key not in apart for key in moves), turns
            assert 0.01 < apart["mem/actor_peak_GiB"] < 4
    log = (tmp_path / "turns" / "logs" / "attempt_1" / "rollout" / "rank0.log").read_text().splitlines()
    slept = [line for line in log if line.startswith("asleep")]
    assert len(slept) > 4, "after the build, and before each of four updates"
    assert set(slept) == {"asleep at level 2"}


def test_a_sampler_that_wakes_as_another_stops_the_run_before_it_samples(tmp_path):
    spec, run = preset("fake", tmp_path), tmp_path / "run"
    done = warm_rlctl("train", spec, "--run-dir", run, *SHARED, *plot(tmp_path / "plot", WAKES_AS_ANOTHER))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "every weight arrived with the right bytes, but rollout 0 does not behave" in " ".join(done.stderr.split())
    assert not (run / "samples.jsonl").exists() or not (run / "samples.jsonl").read_text(), "nothing was sampled"
