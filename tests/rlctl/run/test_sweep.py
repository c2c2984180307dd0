"""`rlctl sweep`: which runs there are, what an earlier call left of them, and a whole one."""

from __future__ import annotations

import io
import json
import signal
import sys
from pathlib import Path

import pytest
from running import finish, metrics, preset, settings, start, steps_done, wait_for, workers_of

from rlctl.run.run_lock import owner_of
from rlctl.run.sweep import expand, plan, split_values, sweep
from rlctl.run.train import print_result
from rlctl.show.journal import Journal
from specs.errors import RunDirError, SpecError, UsageError
from specs.load.load import load_spec


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    return preset("fake", tmp_path)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1e-6,3e-6, 1e-5", ("1e-6", "3e-6", "1e-5")),
        ("grpo,rloo", ("grpo", "rloo")),
        ("[0, 1],[2]", ("[0, 1]", "[2]")),
        ('"a,b","c"', ('"a,b"', '"c"')),
        ("{a = 1, b = 2},{a = 3}", ("{a = 1, b = 2}", "{a = 3}")),
    ],
)
def test_commas_divide_values(text: str, values: tuple[str, ...]) -> None:
    assert split_values(text) == values


def test_keys_with_several_values_are_swept_and_the_others_are_fixed() -> None:
    fixed, swept = expand(["run.steps=3", "run.seed=0,1", "actor.devices=[0, 1]"])
    assert fixed == ["run.steps=3", "actor.devices=[0, 1]"]
    assert swept == {"run.seed": ("0", "1")}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["run.seed=0,1", "run.seed=2,3"], "run.seed is swept already"),
        (["run.seed=0,1", "run.seed=2"], "run.seed is swept already"),
        (["run.name=a,b"], "run.name is of each run"),
        (["run.seed=1,1"], "a value is there twice"),
        (["actor.optimizer.lr=1e-3,2e-3,0.001"], "a value is there twice"),
    ],
)
def test_what_cannot_be_swept(settings: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        expand(settings)
    assert caught.value.hint


def test_every_combination_has_a_name_and_a_directory(spec: Path, tmp_path: Path) -> None:
    swept = {"actor.optimizer.lr": ("1e-3", "1e-2"), "run.seed": ("0", "1")}
    trials, folder = plan(spec, ["run.steps=3"], swept, tmp_path / "out", starting=True)
    assert folder == tmp_path / "out"
    assert [trial.name for trial in trials] == ["lr_1e-3-seed_0", "lr_1e-3-seed_1", "lr_1e-2-seed_0", "lr_1e-2-seed_1"]
    last = trials[-1]
    assert last.overrides == ("run.steps=3", "actor.optimizer.lr=1e-2", "run.seed=1", "run.name=fake-lr_1e-2-seed_1")
    assert (last.run_dir, last.steps, last.state) == (tmp_path / "out" / "lr_1e-2-seed_1", 3, "waiting")


def test_values_that_would_be_called_the_same_have_directories_of_their_own(spec: Path, tmp_path: Path) -> None:
    def names(*seeds: str) -> list[str]:
        templates = ('"a/{prompt}"', '"b/{prompt}"', '"c/{prompt}1"')
        swept = {"run.seed": seeds, "data.template": templates}
        return [trial.run_dir.name for trial in plan(spec, [], swept, tmp_path, starting=True)[0]]

    assert len({*names("0")}) == 3
    known = names("0", "1")
    assert [name for name in names("0", "1", "2") if "seed_2" not in name] == known, "an earlier run would begin again"


def test_a_key_within_a_table_that_is_swept_is_kept(spec: Path, tmp_path: Path) -> None:
    fixed, swept = expand(
        ["actor.optimizer.warmup_steps=3", "actor.optimizer.eps=1e-4,1e-3", "actor.optimizer={lr=1e-3},{lr=1e-2}"]
    )
    trials, _ = plan(spec, fixed, swept, tmp_path / "out", starting=True)
    found = [load_spec(spec, trial.overrides).actor.optimizer for trial in trials]
    assert [(one.eps, one.lr, one.warmup_steps) for one in found] == [
        (1e-4, 1e-3, 3),
        (1e-4, 1e-2, 3),
        (1e-3, 1e-3, 3),
        (1e-3, 1e-2, 3),
    ]


def test_what_is_wrong_in_any_run_is_said_before_the_first(spec: Path, tmp_path: Path) -> None:
    with pytest.raises(SpecError) as caught:
        plan(spec, ["run.stepz=1"], {"actor.optimizer.lr": ("1e-3", "x")}, tmp_path / "out", starting=True)
    assert {(problem.key, "(in lr_x)" in problem.message) for problem in caught.value.problems} == {
        ("run.stepz", False),
        ("actor.optimizer.lr", True),
    }


@pytest.mark.parametrize("dry_run", [True, False])
def test_files_of_every_run_are_looked_at_before_the_first(spec: Path, tmp_path: Path, dry_run: bool) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "12", "answer": "12"}\n' * 9)
    with pytest.raises(SpecError, match=r"no such file.*\(in train_b.jsonl\)") as caught:
        sweep(spec, ["data.train=a.jsonl,b.jsonl"], tmp_path / "out", 1, dry_run=dry_run)
    assert [problem.key for problem in caught.value.problems] == ["data.train"]
    assert not (tmp_path / "out").exists()


class OnTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_same_call_goes_on_where_it_was(
    spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One step of each, beside a package that is called as one of ours; then two of each, resumed; then nothing is left
    to do; then another spec is refused."""
    folder = tmp_path / "out"
    (mine := tmp_path / "mine" / "workers").mkdir(parents=True)
    (mine / "__init__.py").touch()
    with monkeypatch.context() as beside:
        beside.chdir(mine.parent)
        assert sweep(spec, ["run.seed=0,1", "actor.optimizer.lr=1e-3", "run.steps=1"], folder, 2, dry_run=False) == 0
    assert "2 runs, 2 at a time" in capsys.readouterr().out
    call = ("sweep", spec, *settings("run.seed=0,1", "actor.optimizer.lr=1e-3"), "--dir", folder, "--jobs", "2")
    finish(*call, "--set", "run.steps=2")
    for seed in (0, 1):
        run = folder / f"seed_{seed}"
        assert [line["step"] for line in metrics(run) if line["step"]] == [1, 2]
        assert (run / "logs" / "attempt_2").is_dir()
    found = json.loads((folder / "sweep.json").read_text())
    assert [(run["set"], run["state"], run["step"]) for run in sorted(found["runs"], key=lambda run: run["name"])] == [
        ({"run.seed": "0"}, "done", 2),
        ({"run.seed": "1"}, "done", 2),
    ]
    assert found["score"] == "reward/mean"
    page = (folder / "report.html").read_text()
    assert all(f"seed_{seed}" in page for seed in (0, 1))
    best = found["runs"][0]
    assert best["score"] == max(run["score"] for run in found["runs"]) == best["metrics"]["reward/mean"]
    # the line for programs
    line = (folder / "seed_0.log").read_text().splitlines()[-1]
    assert line.startswith("result: ")
    said = json.loads(line.removeprefix("result: "))
    assert said == {
        "run_dir": str(folder / "seed_0"),
        "step": 2,
        "reward/mean": metrics(folder / "seed_0")[-1]["reward/mean"],
    }
    terminal = OnTerminal()
    with monkeypatch.context() as there:
        there.setattr(sys, "stdout", terminal)
        print_result(folder / "seed_0")
    assert terminal.getvalue() == "", "a person has the panel"
    keys = ["run.seed=0,1", "actor.optimizer.lr=1e-3", "run.steps=2"]
    assert sweep(spec, keys, folder, 2, dry_run=False) == 0
    assert "2 runs, 2 of them done before" in capsys.readouterr().out
    assert sweep(spec, keys, folder, 2, dry_run=False, as_json=True) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out) == json.loads((folder / "sweep.json").read_text())
    assert "2 runs, 2 of them done before" in shown.err
    assert sweep(spec, keys, folder, 2, dry_run=False, quiet=True) == 0
    shown = capsys.readouterr()
    assert "2 runs" not in shown.out + shown.err
    assert "reward/mean" in shown.out
    assert not (folder / "seed_0" / "logs" / "attempt_3").exists()
    other = ["run.seed=0,1", "actor.optimizer.lr=1e-3", "run.steps=2", "algorithm.group_size=2"]
    with pytest.raises(UsageError, match=r"holds a run of another spec: algorithm\.group_size"):
        sweep(spec, other, folder, jobs=2, dry_run=False)
    with pytest.raises(UsageError, match="seed_0 holds a run"):
        sweep(spec, keys, folder / "seed_0", jobs=2, dry_run=False)
    assert not (folder / "seed_0" / "sweep.json").exists()
    Journal(folder / "seed_0", 2).note("end", outcome="interrupted")  # in its last evaluation, whose step is saved
    trials, _ = plan(spec, keys[1:], {"run.seed": ("0", "1")}, folder, starting=False)
    assert [trial.state for trial in trials] == ["begun", "done before"]


def test_a_run_that_fails_says_why_and_the_others_are_run(
    spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("rlctl.run.sweep.TRAIN", "print('error: no such thing'); raise SystemExit(2)")
    assert sweep(spec, ["run.seed=0,1"], tmp_path / "out", 1, dry_run=False) == 1
    shown = capsys.readouterr().out
    assert "seed_0: failed at step 0" in shown
    assert "  | error: no such thing" in shown
    assert "seed_1: failed at step 0" in shown


@pytest.mark.usefixtures("warm_children")
def test_a_ctrl_c_ends_every_run_and_each_is_saved(spec: Path, tmp_path: Path) -> None:
    runs = [tmp_path / "out" / f"seed_{seed}" for seed in (0, 1)]
    forever = settings("run.steps=100000", "checkpoint.every=90000")
    process = start("sweep", spec, "--dir", tmp_path / "out", "--set", "run.seed=0,1", *forever, "--jobs", "2")
    try:
        wait_for(lambda: all(steps_done(run) > 1 for run in runs), 90, "two steps of each")
        process.send_signal(signal.SIGINT)
        output = process.communicate(timeout=200)[0]
    finally:
        process.kill()
    assert process.returncode == 130, output
    assert "the same call continues from there" in output
    for run in runs:
        assert not workers_of(run)
        assert list((run / "checkpoints").iterdir())


@pytest.mark.usefixtures("warm_children")
def test_a_sweep_that_is_killed_takes_its_runs_with_it(spec: Path, tmp_path: Path) -> None:
    run = tmp_path / "out" / "seed_0"
    forever = settings("run.steps=100000", "checkpoint.every=90000")
    process = start("sweep", spec, "--dir", tmp_path / "out", "--set", "run.seed=0,1", *forever)
    try:
        wait_for(lambda: steps_done(run) > 1, 90, "two steps")
        with pytest.raises(RunDirError, match="is in use by another rlctl"):
            sweep(spec, ["run.seed=0,1"], tmp_path / "out", jobs=1, dry_run=False)
    finally:
        process.kill()
        process.communicate()
    wait_for(lambda: not workers_of(run) and not owner_of(run), 90, "the end of the run")
    assert list((run / "checkpoints").iterdir()), "its last step is saved"
