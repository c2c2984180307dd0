"""`rlctl runs` lists what is in a folder: state, step and reward of each run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rlctl.run.run_lock import RunLock
from rlctl.run.runs_command import runs
from rlctl.show.journal import EVALUATION, Journal
from rlctl.show.report import render
from specs.errors import UsageError


def run_in(folder: Path, steps: int, outcome: str = "") -> Path:
    folder.mkdir(parents=True)
    (folder / "resolved.json").write_text(json.dumps({"run": {"steps": 9}}))
    lines = ({"step": step, "reward/mean": step / 10} for step in range(1, steps + 1))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    Journal(folder, 1).add("start")
    if outcome:
        Journal(folder, 1).add("end", outcome=outcome)
    return folder


def test_each_run_has_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_in(tmp_path / "a", 9, "done")
    (run_in(tmp_path / "beyond", 12, "done") / "resolved.attempt_2.json").write_text('{"run": {"steps": 3}}')
    run_in(tmp_path / "grid" / "lr_1", 3, "failed")
    run_in(tmp_path / "killed", 0)
    going_on = run_in(tmp_path / "now", 2)
    (going_on / "resolved.attempt_2.json").write_text(json.dumps({"run": {"steps": 20}}))
    lock = RunLock(going_on, "")
    try:
        assert runs(tmp_path) == 0
    finally:
        lock.release()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:5] for line in lines] == [
        ["run", "recipe", "state", "step", "reward"],
        ["a", "rl", "done", "9/9", "0.900"],
        ["beyond", "rl", "done", "12/12", "1.20"],
        ["grid/lr_1", "rl", "failed", "3/9", "0.300"],
        ["killed", "rl", "killed", "0/9", "–"],
        ["now", "rl", "running", "2/20", "0.200"],
    ]
    assert all(re.search(r"  \d{4}-\d\d-\d\d \d\d:\d\d$", line) for line in lines[1:])
    assert runs(tmp_path, as_json=True) == 0
    first = json.loads(capsys.readouterr().out)[0]
    assert (first["run"], first["step"], first["steps"], first["reward"]) == ("a", 9, 9, 0.9)


def test_a_number_that_is_no_reward_says_what_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_in(tmp_path / "tuned", 9) / "metrics.jsonl").write_text('{"step": 9, "actor/loss": 0.25}\n')
    runs(tmp_path)
    assert "9/9  0.250 loss  " in capsys.readouterr().out


def test_a_run_with_a_list_for_its_reward_takes_no_other_line_along(tmp_path: Path, capsys) -> None:
    run_in(tmp_path / "a", 9, "done")
    (run_in(tmp_path / "b", 0) / "metrics.jsonl").write_text('{"step": 1, "eval/heldout/reward_mean": [1, 2]}\n')
    assert runs(tmp_path) == 0
    assert [line.split()[3:5] for line in capsys.readouterr().out.splitlines()[1:]] == [["9/9", "0.900"], ["1/9", "–"]]


def test_a_folder_that_is_no_sound_run_takes_no_other_line_along(tmp_path: Path, capsys) -> None:
    run_in(tmp_path / "a", 9, "done")
    (run_in(tmp_path / "b", 0) / "resolved.json").write_text('{"run": {"recipe": ["sft"], "steps": 9}}')
    (tmp_path / "c" / "resolved.json").mkdir(parents=True)
    assert runs(tmp_path) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]] == ["a", "b"]


def test_an_evaluation_has_the_step_of_its_weights_and_none_to_take(tmp_path: Path, capsys) -> None:
    folder = run_in(tmp_path / "model-eval", 0)
    Journal(folder, 1).add(EVALUATION)
    Journal(folder, 1).add("end", outcome="done")
    (folder / "metrics.jsonl").write_text('{"step": 0, "eval/heldout/reward_mean": 0.5}\n')
    runs(tmp_path)
    assert capsys.readouterr().out.splitlines()[1].split()[:5] == ["model-eval", "eval", "done", "0", "0.500"]
    assert "of 9" not in render(folder)


def test_of_a_long_run_the_end_alone_is_decoded(tmp_path: Path, capsys) -> None:
    lines = (run_in(tmp_path / "long", 20) / "metrics.jsonl").read_text().splitlines()
    for evaluated, reward in ((lines[4], "1.95"), ('{"step": 5, "eval/heldout/reward_mean": 0.5}', "0.500")):
        cut = ["not JSON"] * 4 + [evaluated] + ["not JSON"] * 13 + lines[18:]
        (tmp_path / "long/metrics.jsonl").write_text("\n".join(cut) + "\n")
        runs(tmp_path)
        assert capsys.readouterr().out.splitlines()[1].split()[3:5] == ["20/20", reward]


def test_before_a_damaged_last_line_counts_the_last_whole_one(tmp_path: Path, capsys) -> None:
    for name, evaluated in (("a", ""), ("b", '{"step": 2, "eval/held/reward_mean": 0.5}\n{"eval/cut\n')):
        with (run_in(tmp_path / name, 3) / "metrics.jsonl").open("a") as file:
            file.write(evaluated + '{"step": 4, "rew\n{"step": 5')
    runs(tmp_path)
    shown = [line.split()[3:5] for line in capsys.readouterr().out.splitlines()[1:]]
    assert shown == [["3/9", "0.300"], ["2/9", "0.500"]]


def test_a_folder_without_runs_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no runs"):
        runs(tmp_path)
