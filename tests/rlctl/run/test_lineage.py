"""Where a run comes from: resumed by its directory alone, begun anew, forked from another run's checkpoint."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import tomli
from running import finish, metrics, preset, settings, trajectory

from rlctl.cli import main
from rlctl.run.train import train
from rlctl.show.journal import read_journal
from specs.errors import CheckpointError, RunDirError, UsageError
from specs.load.load import load_spec

OPTIONS = settings("run.steps=6", "checkpoint.every=2", "checkpoint.keep=3")
OPTIONS += settings("algorithm.mini_batches_per_step=2")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps of a spec with a reward file beside it, saved at 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "rewards.py").write_text("def score(completion, answer):\n    return completion[:2] == answer[:2]\n")
    term = settings('reward.terms=[{kind="function", path="rewards.py:score"}, {kind="exact_match", partial=true}]')
    finish("train", preset("fake", folder), "--run-dir", folder / "run", *OPTIONS, *term)
    return folder / "run"


def test_the_spec_in_the_run_directory_is_the_one_that_was_run(whole: Path) -> None:
    spec = load_spec(whole / "spec.toml")
    assert spec.resolved() == json.loads((whole / "resolved.json").read_text())
    assert spec.run.steps == 6
    assert "# --set run.steps=6\n" in (whole / "spec.toml").read_text()
    (start,) = [line for line in read_journal(whole) if line["event"] == "start"]
    assert (start["spec_dir"], start["overrides"][0]) == (str(whole.parent), "run.steps=6")
    assert read_journal(whole)[-1]["outcome"] == "done"


def test_a_run_is_resumed_by_its_directory_from_anywhere(whole: Path, tmp_path: Path) -> None:
    """The reward file stands beside the spec, which is neither here nor in the run directory."""
    run = tmp_path / "moved"
    shutil.copytree(whole, run)
    finish("train", run, "--resume", "--set", "run.steps=7", cwd=tmp_path)
    assert [line["step"] for line in metrics(run)] == [1, 2, 3, 4, 5, 6, 7]
    assert tomli.loads((run / "spec.attempt_2.toml").read_text())["run"]["steps"] == 7


def test_where_the_folder_of_a_runs_spec_is_gone_that_is_said_first(whole: Path, tmp_path: Path, capfd) -> None:
    """As where a project was moved with its runs."""
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    journal = (run / "journal.jsonl").read_text()
    (run / "journal.jsonl").write_text(journal.replace(str(whole.parent), str(tmp_path / "gone")))
    evaluated = settings("eval.every=1", 'eval.data="builtin:sort-digits"')
    for command in (["train", str(run), "--resume"], ["eval", str(run), *evaluated]):
        assert main(command) == 2
        first, _, rest = capfd.readouterr().err.partition("error: reward.terms.0.path")
        assert f"start at {tmp_path / 'gone'}, which is not there" in first.replace("\n", " ")
        assert "name the spec: rlctl train SPEC" in first.replace("\n", " ")
        assert rest


def test_a_fork_goes_on_as_the_run_would_until_something_is_changed(whole: Path, tmp_path: Path) -> None:
    spec = whole.parent / "fake.toml"
    terms = json.loads((whole / "resolved.json").read_text())["reward"]["terms"]
    term = settings(
        f'reward.terms=[{{kind="function", path="{terms[0]["path"]}"}}, {{kind="exact_match", partial=true}}]'
    )
    same, other = tmp_path / "same", tmp_path / "other"
    done = finish("train", spec, "--run-dir", same, "--from", f"{whole}@4", *OPTIONS, *term)
    assert f"forked from {whole / 'checkpoints' / 'step_000004'}" in done.stdout
    assert trajectory(same) == trajectory(whole)[4:]
    assert json.loads((same / "forked_from.json").read_text()) == {"run": str(whole), "step": 4}
    manifest = json.loads((same / "checkpoints" / "step_000006" / "manifest.json").read_text())
    assert manifest["forked_from"] == [str(whole), 4]

    changed = settings("actor.optimizer.schedule=cosine", "algorithm.mini_batches_per_step=1")
    changed += settings("actor.optimizer.lr=0.9", "algorithm.group_size=8", "checkpoint.every=50")
    done = finish("train", spec, "--run-dir", other, "--from", f"{whole}@4", *OPTIONS, *term, *changed)
    first = trajectory(other)
    assert first[0][0] == 5
    assert first != trajectory(whole)[4:]
    lrs = [0.9 * 0.5 * (1 + math.cos(math.pi * step / 6)) for step in (4, 5)]
    assert [line["actor/lr"] for line in metrics(other)] == pytest.approx(lrs), "its own schedule's, whose clock it has"
    shutil.rmtree(other / "checkpoints")  # as if it had been killed before its first one
    done = finish("train", other, "--resume")
    assert "starting at step 5, as forked" in done.stdout
    assert trajectory(other) == first


def test_a_fork_has_the_learning_rate_of_a_run_that_left_optimizer_steps_out(tmp_path: Path) -> None:
    """Where a mini-batch has no loss tokens, no step is made, and the schedule waits."""
    spec, run, fork = preset("fake", tmp_path), tmp_path / "run", tmp_path / "fork"
    few = settings("algorithm.mask_truncated=true", "data.max_response_tokens=2", "actor.optimizer.schedule=linear")
    few += (*OPTIONS, *settings("algorithm.mini_batches_per_step=8"))
    finish("train", spec, "--run-dir", run, *few)
    finish("train", spec, "--run-dir", fork, "--from", f"{run}@4", *few)
    rates = [line["actor/lr"] for line in metrics(run)]
    assert rates[4] > 0.05 * 2 / 6, "steps were left out"
    assert [line["actor/lr"] for line in metrics(fork)] == rates[4:]


def test_what_cannot_be_forked_is_said_before_anything_is_made(whole: Path, tmp_path: Path) -> None:
    spec, run = whole.parent / "fake.toml", tmp_path / "run"

    def fork(of: str, *overrides: str) -> None:
        train(spec, ["run.steps=20", *overrides], run, False, fork_of=of)

    with pytest.raises(UsageError, match="has no checkpoint of step 5") as error:
        fork(f"{whole}@5")
    assert error.value.hint == "it has: 2, 4, 6"
    with pytest.raises(UsageError, match=r"that is step 6, and run.steps = 3"):
        fork(str(whole), "run.steps=3")
    with pytest.raises(UsageError, match="the last 8 rows of data"):
        fork(str(whole), "eval={every=1, prompts=8}")
    with pytest.raises(UsageError, match="holds no run"):
        fork(str(tmp_path))
    taught = json.loads((whole / "resolved.json").read_text())
    (tmp_path / "taught").mkdir()
    (tmp_path / "taught" / "resolved.json").write_text(
        json.dumps({**taught, "run": {**taught["run"], "recipe": "sft"}})
    )
    with pytest.raises(UsageError, match="recipe is sft, and the reference here would not be the model that it made"):
        fork(str(tmp_path / "taught"), "algorithm.kl_coef=0.1")
    with pytest.raises(CheckpointError, match="belongs to another model"):
        fork(str(whole), "model.path=builtin:mini-digits")
    assert not run.exists()


def test_a_run_directory_is_no_spec_without_resume(whole: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the directory of a run, not a spec") as error:
        train(whole, [], None, False)
    assert "--resume" in error.value.hint
    with pytest.raises(UsageError, match="the run is in"):
        train(whole, [], tmp_path, True)
    old = tmp_path / "old"
    shutil.copytree(whole, old)
    (old / "journal.jsonl").unlink()
    with pytest.raises(RunDirError, match="does not say where its spec came from"):
        train(old, [], None, True)


def test_a_report_can_be_written_of_a_run_that_was_killed(whole: Path, tmp_path: Path, capsys) -> None:
    run = tmp_path / "killed"
    shutil.copytree(whole, run)
    lines = (run / "journal.jsonl").read_text().splitlines(keepends=True)
    (run / "journal.jsonl").write_text("".join(line for line in lines if '"event": "end"' not in line))
    (run / "report.html").unlink()
    assert main(["report", str(run)]) == 0
    assert "Ended after step 6 without a word" in (run / "report.html").read_text()
    (run / "resolved.attempt_2.json").write_text(json.dumps({"run": {"steps": 99}}))
    assert main(["report", str(run), str(whole), "--out", str(tmp_path / "both.html")]) == 0
    assert "2 runs" in (tmp_path / "both.html").read_text()
    shown = capsys.readouterr().out
    assert "unfinished" in shown
    assert ["run.steps", "99", "6"] in [line.split() for line in shown.splitlines()], "what differs in their specs"
    assert main(["report", str(run), "--out", str(tmp_path / "one.html")]) == 0
    page = (tmp_path / "one.html").read_text()
    assert "Ended after step 6 without a word" in page, "the page of that run, and no comparison of one"
    assert 'href="killed/metrics.jsonl"' in page, "links lead into the run directory"
    assert main(["report", str(tmp_path)]) == 2
