"""Real runs whose samplers crash: they come back, and the run is the one without crashes, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import crashing
import psutil
import pytest
from running import finish, metrics, preset, settings, trajectory, wait_for, warm_rlctl, workers_of

pytestmark = pytest.mark.slow

TWO = settings("run.steps=6", "rollout.processes=2")
# One after the other: while it writes, after a part has left; while others learn; in a sync; by its engine's word.
CRASHES = [
    {"role": "rollout", "rank": 1, "method": "generate", "call": 2, "parts": 1},
    {"role": "actor", "method": "forward_backward", "call": 3, "victim": "rollout 0"},
    {"role": "rollout", "rank": 1, "method": "import_weight", "call": 4, "after": 0},
    {"role": "rollout", "rank": 0, "method": "generate", "call": 2, "how": "died", "after": 1},
]
AS_THEY_TAKE_TURNS = [
    {"role": "rollout", "rank": 1, "method": "wake", "call": 2, "after": 2},
    {"role": "rollout", "rank": 1, "method": "sleep", "call": 3, "how": "stop", "after": 4},
    {"role": "rollout", "rank": 0, "method": "generate", "call": 1, "how": "sleep", "after": 5},  # heartbeats go on
]
# The only process that grades: as it begins, as it is built again, while others learn and save, and in an evaluation.
OF_THE_GRADER = [
    {"role": "reward", "method": "score train", "call": 2},
    {"role": "reward", "method": "wait_ready", "call": 1, "after": 0},
    {"role": "actor", "method": "forward_backward", "call": 1, "victim": "reward 0", "after": 1},
    {"role": "actor", "method": "save", "call": 1, "victim": "reward 0", "after": 2},
    {"role": "reward", "method": "score eval", "call": 1, "after": 3},
]
# It starts a process of its own, and kills the process that asked for the score.
DEADLY = """
import os, signal, subprocess
from pathlib import Path

def score(completion, answer):
    subprocess.Popen(["sleep", "1234"], start_new_session=True)
    if Path(f"/proc/{os.getppid()}/comm").read_text().startswith("rlctl-reward"):
        os.kill(os.getppid(), signal.SIGKILL)
    return 0.0
"""
STALL = settings("run.stall_timeout_s=8", "reward.timeout_s=7")
TAKING_TURNS = (*settings('run.colocate="always"', "run.heartbeat_timeout_s=6"), *STALL)


def nothing_left(run: Path) -> None:
    wait_for(lambda: not workers_of(run), 150, "the end of every worker")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run without crashes."""
    folder = tmp_path_factory.mktemp("plain")
    finish("train", preset("fake", folder), "--run-dir", folder / "run", *TWO)
    assert {line["rollout/restarts"] for line in metrics(folder / "run")} == {0}
    return folder / "run"


def test_crashes_change_nothing(plain: Path, tmp_path: Path) -> None:
    crashes, plot, run = [*CRASHES, *AS_THEY_TAKE_TURNS], tmp_path / "plot", tmp_path / "run"
    options = [*crashing.install(plot, crashes), *TAKING_TURNS, "--set", f"rollout.max_restarts={len(crashes)}"]
    done = finish("train", preset("fake", tmp_path), "--run-dir", run, *TWO, *options)
    assert crashing.happened(plot) == [1] * len(crashes)
    assert trajectory(run) == trajectory(plain)

    lines = metrics(run)
    assert lines[-1]["rollout/restarts"] == len(crashes)
    for before, line in zip([{"rollout/restarts": 0}, *lines], lines, strict=False):
        assert (line["time/restart_s"] > 0) == (line["rollout/restarts"] > before["rollout/restarts"])
        assert line["sync/verified"] is True
    said = [line for line in done.stdout.splitlines() if "failed: " in line]
    assert len(said) == len(crashes)
    assert "rollout rank 1 failed: its process was ended by SIGKILL" in done.stdout
    assert "rollout rank 0 failed: the engine's own process ended" in done.stdout
    assert all(f"restart {i} of at most {len(crashes)}" in line for i, line in enumerate(said, 1))
    assert all("rollout/rank" in line for line in said)
    assert "no sign of life" in done.stdout
    assert "which is in generate of" in done.stdout
    assert "without a token, at crash (sitecustomize.py" in done.stdout.replace("\n", "")
    restarts = sum(
        (run / "logs" / "attempt_1" / "rollout" / f"rank{rank}.log").read_text().count("is started again")
        for rank in (0, 1)
    )
    assert restarts == len(crashes)
    what_was_sent_stands(crashing.journal(plot))
    nothing_left(run)


def test_losses_of_the_only_grader_change_nothing(tmp_path: Path) -> None:
    plot, run, losses = tmp_path / "plot", tmp_path / "run", len(OF_THE_GRADER)
    common = ["train", preset("fake", tmp_path), *TWO, *settings("eval.every=2", "eval.prompts=4")]
    finish(*common, "--run-dir", tmp_path / "plain")
    options = [*crashing.install(plot, OF_THE_GRADER), *settings(f"reward.max_restarts={losses}")]
    done = finish(*common, "--run-dir", run, *options)
    assert crashing.happened(plot) == [1] * losses
    assert trajectory(run) == trajectory(tmp_path / "plain")
    assert (run / "eval.jsonl").read_text() == (tmp_path / "plain" / "eval.jsonl").read_text()
    assert metrics(run)[-1]["reward/restarts"] == losses
    said = [line for line in done.stdout.splitlines() if "reward rank 0 failed: " in line]
    assert len(said) == losses, done.stdout
    assert all(f"restart {i} of at most {losses}, reward.max_restarts" in line for i, line in enumerate(said, 1))
    nothing_left(run)


def test_a_reward_that_kills_its_process_each_time_ends_the_run(tmp_path: Path) -> None:
    (tmp_path / "deadly.py").write_text(DEADLY)
    options = settings('reward.terms=[{kind="function", path="deadly.py:score"}]')
    done = warm_rlctl("train", preset("fake", tmp_path), "--run-dir", tmp_path / "run", *options)
    assert done.returncode == 1, done.stdout + done.stderr
    said = " ".join(done.stderr.split())
    assert "reward rank 0, verb score" in said
    assert "its process was ended by SIGKILL (reward ranks were started again 3 times before" in said
    assert "reward.max_restarts = 3)" in said
    nothing_left(tmp_path / "run")
    assert not any(process.info["cmdline"] == ["sleep", "1234"] for process in psutil.process_iter(["cmdline"]))


def what_was_sent_stands(calls: list[dict]) -> None:
    """In the step of the first crash the second replica has sent one of its four groups of four, and the first replica
    all: three groups go out again, and only those."""
    of_step = [set(call["ids"]) for call in calls if set(call["ids"]) & set(range(32, 64))]
    first, again = of_step[:2], of_step[2:]
    assert [len(ids) for ids in first] == [16, 16]
    assert sum(len(ids) for ids in again[:2]) == 12
    assert set.union(*again) < max(first, key=lambda ids: len(ids & set.union(*again)))


def test_a_crash_while_the_rollout_runs_ahead_is_made_good_after_the_update(tmp_path: Path) -> None:
    """The second step's batch is being written while the first is learned from. Of its eight groups, drawn with the
    first weights, three go out again with those of after the update."""
    plot, run = tmp_path / "plot", tmp_path / "run"
    options = [*crashing.install(plot, [CRASHES[0]]), "--set", "rollout.max_staleness=1"]
    finish("train", preset("fake", tmp_path), "--run-dir", run, *TWO, *options, "--set", "run.steps=4")
    lines = metrics(run)
    assert [line["rollout/staleness_mean"] for line in lines] == [0, 5 / 8, 1, 1]
    assert lines[-1]["rollout/restarts"] == 1
    what_was_sent_stands(crashing.journal(plot))
    nothing_left(run)


def test_a_replica_that_dies_at_once_after_each_restart_does_not_go_on_for_ever(tmp_path: Path) -> None:
    plot, run = tmp_path / "plot", tmp_path / "run"
    once = {"role": "rollout", "rank": 1, "method": "generate", "call": 2}
    then = {"role": "rollout", "rank": 1, "method": "build", "call": 1, "times": 99, "after": 0}
    done = warm_rlctl("train", preset("fake", tmp_path), "--run-dir", run, *TWO, *crashing.install(plot, [once, then]))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "rollout rank 1, verb build" in done.stderr
    assert "started again 3 times before; rollout.max_restarts = 3" in done.stderr.replace("\n", " ")
    assert crashing.happened(plot) == [1, 3]
    nothing_left(run)


def test_a_run_that_begins_with_one_replica_of_three_is_the_same(plain: Path, tmp_path: Path) -> None:
    """One dies as it is built; one connects late, and joins when the first has been sampling."""
    plot, run = tmp_path / "plot", tmp_path / "run"
    faults = [
        {"role": "rollout", "rank": 1, "method": "build", "call": 1},
        {"role": "rollout", "rank": 2, "method": "connect", "call": 1, "how": "late"},
    ]
    engines = {"rollout": [*crashing.FAKE["rollout"], ["workers.connection", "Link", ["connect"]]]}
    options = [*settings("rollout.processes=3", "rollout.min_processes=1", "run.start_timeout_s=12")]
    done = finish(
        "train", preset("fake", tmp_path), "--run-dir", run, *TWO, *crashing.install(plot, faults, engines), *options
    )
    assert trajectory(run) == trajectory(plain)
    said = " ".join(done.stdout.split())
    assert "rollout rank 1 failed for good: its process was ended by SIGKILL. The run continues with 1 of them" in said
    assert "rollout rank 2 did not join within 12 s. The run continues with 2 of 3 replicas" in said
    assert "rollout rank 2 came late and takes part now: 2 of 3 replicas" in said
    counted = [[line[f"rollout/{name}"] for name in ("replicas", "late", "dropped")] for line in metrics(run)]
    assert counted[-1] == [2, 0, 1]
    built = json.loads((run / "as_built.json").read_text())["rollout"]
    assert [rank["rank"] for rank in built] == [0, 2]
    calls = crashing.journal(plot)
    assert {call["rank"] for call in calls} == {0, 2}
    assert "2 of 3 replicas" in (run / "report.html").read_text()
    nothing_left(run)


def test_one_that_comes_back_as_something_else_is_refused(tmp_path: Path) -> None:
    plot, run = tmp_path / "plot", tmp_path / "run"
    once = {"role": "rollout", "method": "generate", "call": 1}
    other = {"role": "rollout", "method": "built", "call": 1, "how": "other model", "after": 0}
    done = warm_rlctl("train", preset("fake", tmp_path), "--run-dir", run, *crashing.install(plot, [once, other]))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "rollout rank 0 was restarted and differs from before" in done.stderr
    nothing_left(run)


def test_the_real_engine_over_a_process_group(tmp_path: Path) -> None:
    """The group of the actor and both samplers is made anew each time; the run without crashes has one sampler."""
    small = """run.steps=2 data.prompts_per_step=4 algorithm.group_size=4 rollout.threads=1
        actor.threads=1 eval.prompts=4""".split()  # noqa: SIM905
    common = ["train", preset("quickstart", tmp_path), *(part for one in small for part in ("--set", one))]
    crashes = [
        {"role": "rollout", "rank": 1, "method": "generate", "call": 2},
        {"role": "rollout", "rank": 0, "method": "import_weight", "call": 65},
    ]
    transport = [*settings("rollout.processes=2", 'sync.transport="group"', "sync.bucket_MiB=0.01")]
    options = [*crashing.install(tmp_path / "plot", crashes, crashing.TORCH), *transport]
    runs = tmp_path / "plain", tmp_path / "crashed"
    for run, more in zip(runs, ([], options), strict=True):
        finish(*common, "--run-dir", run, *more)
    assert crashing.happened(tmp_path / "plot") == [1, 1]
    for crashed, plain in zip(*map(trajectory, reversed(runs)), strict=True):
        assert crashed[:-1] == plain[:-1]
        assert abs(crashed[-1] - plain[-1]) < 1e-6  # the sampler's own log-probs: rounded as its batch fell
    last = [metrics(run)[-1] for run in runs]
    assert [line["eval/heldout/reward_mean"] for line in last] == [last[0]["eval/heldout/reward_mean"]] * 2
    assert last[1]["rollout/restarts"] == 2
    built = json.loads((runs[1] / "as_built.json").read_text())
    assert built["sync"]["transport"] == "group"
