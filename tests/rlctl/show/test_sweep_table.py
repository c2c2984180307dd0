"""Runs of a sweep, ranked: by their last evaluation, else by the mean reward of their last steps."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest

from rlctl.show.screen import Screen
from rlctl.show.sweep_table import SweepTable, Trial, outcome


def a_run(folder: Path, rewards: list[float], evals: dict[int, float] | None = None) -> Path:
    folder.mkdir(parents=True)
    lines = [
        {"step": step, "reward/mean": reward}
        | ({"eval/test/reward_mean": evals[step]} if evals and step in evals else {})
        for step, reward in enumerate(rewards, start=1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def text_of(table: SweepTable) -> list[list[str]]:
    table.print_results()
    file = table.console.file
    assert isinstance(file, io.StringIO)
    return [line.split() for line in file.getvalue().splitlines()]


def table_of(folder: Path, keys: list[str], trials: list[Trial]) -> SweepTable:
    return SweepTable(keys, trials, folder, Screen(file=io.StringIO(), width=20))


def trial(run_dir: Path, **values: str) -> Trial:
    own = {key.replace("__", "."): value for key, value in values.items()}
    return Trial(run_dir.name, own, (), run_dir, 20, "done")


def test_a_score_is_the_last_evaluation_else_the_last_tenth_of_the_rewards(tmp_path: Path) -> None:
    rewards = [step / 100 for step in range(1, 21)]
    assert outcome(a_run(tmp_path / "a", rewards)).score == pytest.approx((0.19 + 0.20) / 2)
    assert outcome(a_run(tmp_path / "b", rewards, {1: 0.9, 15: 0.4})).score == 0.4
    assert outcome(tmp_path / "none").score is None


def test_the_best_stands_first_and_no_cell_is_cut(tmp_path: Path) -> None:
    lrs = {"1e-6": 0.1, "3e-6": 0.7, "1e-5": 0.4}
    trials = [trial(a_run(tmp_path / lr, [reward]), actor__optimizer__lr=lr) for lr, reward in lrs.items()]
    trials.append(trial(tmp_path / "none", actor__optimizer__lr="1", lr="1"))
    head, *rows = text_of(table_of(tmp_path, ["actor.optimizer.lr"], trials))[:5]
    assert head == ["actor.optimizer.lr", "reward/mean", "step", "state"]
    for report in (False, True):  # a page is named once it is there
        (tmp_path / "report.html").touch() if report else None
        assert (text_of(table_of(tmp_path, ["lr"], trials[3:]))[-1][0] == "report:") is report
    assert rows == [
        ["3e-6", "0.700", "1/20", "done"],
        ["1e-5", "0.400", "1/20", "done"],
        ["1e-6", "0.100", "1/20", "done"],
        ["1", "–", "0/20", "done"],
    ]


@pytest.mark.parametrize("step", [0, 1])
def test_a_run_that_failed_is_not_the_best(step: int, tmp_path: Path) -> None:
    """Its evaluation may be of what every run began with."""
    trials = [trial(a_run(tmp_path / "learned", [0.1], {1: 0.3}), lr="1e-6"), trial(tmp_path / "failed", lr="1")]
    trials[1] = replace(trials[1], state="failed")
    (tmp_path / "failed").mkdir()
    lines = [{"step": 0, "eval/test/reward_mean": 0.5}, *[{"step": 1, "reward/mean": 0.2}] * step]
    (tmp_path / "failed" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    table = table_of(tmp_path, ["lr"], trials)
    assert text_of(table)[1:3] == [["1e-6", "0.300", "1/20", "done"], ["1", "0.500", f"{step}/20", "failed"]]
    assert table.as_object()["runs"][0]["name"] == "learned"


@pytest.mark.parametrize(("metric", "best"), [("reward_mean", "b"), ("loss", "a")])
def test_the_best_of_an_evaluation_stands_first_also_where_steps_have_a_loss(
    metric: str, best: str, tmp_path: Path
) -> None:
    trials = []
    for lr, seed, value in (("a", "0", 0.1), ("b", "0", 0.7), ("a", "1", 0.2), ("b", "1", 0.9)):
        (tmp_path / (lr + seed)).mkdir()
        line = {"step": 1, "actor/loss": 1 / value, f"eval/test/{metric}": value}
        (tmp_path / (lr + seed) / "metrics.jsonl").write_text(json.dumps(line) + "\n")
        trials.append(trial(tmp_path / (lr + seed), lr=lr, run__seed=seed))
    table = table_of(tmp_path, ["lr", "run.seed"], trials)
    lines = text_of(table)
    assert [line[0] for line in lines[1:3]] == [best, best]
    assert lines[lines.index(["over", "seeds"]) + 2][0] == best
    assert [run["set"]["lr"] for run in table.as_object()["runs"]][:2] == [best, best]


def test_what_is_scored_by_another_metric_is_not_ranked_against_the_others(tmp_path: Path) -> None:
    """As kto, which has a loss alone, beside dpo: here it failed, or is done with the least loss."""
    lines = {"dpo": {"actor/reward_accuracy": 0.6, "actor/loss": 0.9}, "ipo": {"actor/reward_accuracy": 0.7}}
    trials = []
    for kind, line in {"kto": {"actor/loss": -2.0}, **lines}.items():
        (tmp_path / kind).mkdir()
        (tmp_path / kind / "metrics.jsonl").write_text(json.dumps({"step": 1, **line}) + "\n")
        trials.append(trial(tmp_path / kind, objective__kind=kind))
    failed = table_of(tmp_path, ["objective.kind"], [replace(trials[0], state="failed"), *trials[1:]])
    first = table_of(tmp_path, ["objective.kind"], trials)
    done = table_of(tmp_path, ["objective.kind"], [*trials[1:], trials[0]])
    for table in (failed, first, done):
        rows = [line[:2] for line in text_of(table)[:4]]
        assert rows == [["objective.kind", "actor/reward_accuracy"], ["ipo", "0.700"], ["dpo", "0.600"], ["kto", "–"]]
    assert [run["score"] for run in done.as_object()["runs"]] == [0.7, 0.6, None]


def test_over_seeds_there_are_means_and_deviations(tmp_path: Path) -> None:
    scores = {("1e-6", "0"): 0.1, ("1e-6", "1"): 0.3, ("1e-5", "0"): 0.5, ("1e-5", "1"): 0.9}
    trials = [
        trial(a_run(tmp_path / "".join(own), [0.0], {1: score}), lr=own[0], run__seed=own[1])
        for own, score in scores.items()
    ]
    trials.append(Trial("failed", {"lr": "1e-5", "run.seed": "2"}, (), a_run(tmp_path / "f", [0.0]), 20, "failed"))
    lines = text_of(table_of(tmp_path, ["lr", "run.seed"], trials))
    assert lines[0] == ["lr", "run.seed", "eval/test/reward_mean", "step", "state"]
    start = lines.index(["over", "seeds"])
    assert lines[start + 1 : start + 4] == [
        ["lr", "mean", "std", "runs"],
        ["1e-5", "0.700", "0.283", "2"],
        ["1e-6", "0.200", "0.141", "2"],
    ]
    none = table_of(tmp_path, ["lr", "run.seed"], trials[-1:])
    assert ["over", "seeds"] not in text_of(none), "where no run ended there is nothing to say"
