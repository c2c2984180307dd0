"""Run directories: one run at a time, numbered attempts, no silent change of the spec."""

import errno
import json
import os
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from running import preset

from rlctl.run.lineage import Fork
from rlctl.run.run_dir import RunDir
from rlctl.run.train import Steps
from specs.errors import RlctlError, RunDirError
from specs.load.load import load_spec


@pytest.fixture
def spec_path(tmp_path):
    return preset("fake", tmp_path)


@contextmanager
def attempt(spec_path, *overrides, resume=True):
    """An attempt of the run beside the spec."""
    run = RunDir(spec_path.with_name("run"))
    run.open(load_spec(spec_path, overrides), spec_path, resume=resume)
    yield run
    run.release()


def test_attempts_are_numbered_and_nothing_is_overwritten(tmp_path, spec_path):
    with attempt(spec_path, resume=False) as first:
        assert first.attempt == 1
        assert (first.path / "spec.toml").read_bytes() == spec_path.read_bytes()
        first.metrics.write_text('{"step": 1}\n')
    with attempt(spec_path, "run.steps=99") as second:
        assert (second.attempt, second.logs.name) == (2, "attempt_2")
        assert second.changes == ["run.steps: 6 → 99"]
    for steps, told in ((99, []), (7, ["run.steps: 99 → 7"]), (6, ["run.steps: 7 → 6"])):  # against the last attempt
        with attempt(spec_path, f"run.steps={steps}") as again:
            assert again.changes == told


def test_keys_that_came_after_an_older_rlctl_began_the_run_have_their_defaults(tmp_path, spec_path):
    with attempt(spec_path, resume=False) as first:
        first.metrics.write_text('{"step": 1}\n')
    before = json.loads(first.resolved.read_text())
    del before["environment"], before["rollout"]["in_flight"], before["algorithm"]["scale"]
    del before["reward"]["terms"][0]["ignore_case"], before["data"]["tools_column"]
    first.resolved.write_text(json.dumps(before))
    with attempt(spec_path) as again:
        assert again.changes == []
    with pytest.raises(RunDirError, match=r"differs .*\n  - algorithm\.scale: unset → \"none\""):
        RunDir(tmp_path / "run").open(load_spec(spec_path, ["algorithm.scale=none"]), spec_path, resume=True)


def test_refusals_change_nothing(tmp_path, spec_path):
    spec = load_spec(spec_path)
    with pytest.raises(RunDirError, match="no run to resume"):
        RunDir(tmp_path / "run").open(spec, spec_path, resume=True)
    assert not (tmp_path / "run").exists()
    with attempt(spec_path, resume=False) as run:
        run.metrics.write_text('{"step": 1}\n')
    with pytest.raises(RunDirError, match="already holds a run"):
        RunDir(tmp_path / "run").open(spec, spec_path, resume=False)
    with pytest.raises(RunDirError, match=r"differs .*\n  - actor\.optimizer\.lr: 0\.05 → 0\.5"):
        RunDir(tmp_path / "run").open(load_spec(spec_path, ["actor.optimizer.lr=0.5"]), spec_path, resume=True)
    assert [p.name for p in (tmp_path / "run" / "logs").iterdir()] == ["attempt_1"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    with pytest.raises(RunDirError, match="not empty"):
        RunDir(tmp_path / "mine").open(spec, spec_path, resume=False)


def test_a_run_that_never_made_a_step_may_begin_again(tmp_path, spec_path):
    """A reward that cannot be imported must not cost a new directory once it is fixed."""
    with attempt(spec_path, resume=False) as run:
        run.as_built.write_text("{}")
    with attempt(spec_path, "run.seed=5", resume=False) as again:
        assert again.attempt == 2
        assert not again.as_built.exists()
        assert '"seed": 5' in (again.path / "resolved.json").read_text()


def test_a_run_that_found_the_disk_full_as_it_began_may_begin_again(spec_path, monkeypatch):
    def full(source, target):
        raise OSError(errno.ENOSPC, "No space left on device", str(source))

    with monkeypatch.context() as patch:
        patch.setattr("specs.json_file.os.replace", full)
        with pytest.raises(RlctlError, match="is full"):
            RunDir(spec_path.with_name("run")).open(load_spec(spec_path), spec_path, resume=False)
    with attempt(spec_path, resume=False) as again:
        assert again.resolved.is_file()


def test_a_saved_step_that_was_moved_away_is_not_called_unsaved(tmp_path):
    steps = Steps.__new__(Steps)
    steps.run, steps.saver = RunDir(tmp_path), SimpleNamespace(saved=3)
    assert steps._where_to_resume().startswith(f"step 3 was saved, but {tmp_path}/checkpoints/step_000003 is no longer")


def test_a_fork_that_never_made_a_step_leaves_nothing_to_a_plain_run(tmp_path, spec_path):
    with attempt(spec_path, resume=False) as run:
        Fork(tmp_path / "other", 4).write(run.path)
    for resume, of in ((True, Fork(tmp_path / "other", 4)), (False, None)):
        with attempt(spec_path, resume=resume):
            pass
        assert Fork.of(run.path) == of


def test_a_fork_is_named_before_there_is_a_run_to_resume(tmp_path, spec_path, monkeypatch):
    """Else a resume of one whose beginning was cut off there would train the first weights."""
    fork, real = Fork(tmp_path / "other", 4), os.replace

    def full(source, target):
        if target.name == "resolved.json":
            raise OSError(errno.ENOSPC, "No space left on device", str(source))
        real(source, target)

    run = RunDir(spec_path.with_name("run"))
    with monkeypatch.context() as patch:
        patch.setattr("specs.json_file.os.replace", full)
        with pytest.raises(RlctlError, match="is full"):
            run.open(load_spec(spec_path), spec_path, resume=False, fork=fork)
    assert Fork.of(run.path) == fork
    with pytest.raises(RunDirError, match="holds no run to resume"):
        run.open(load_spec(spec_path), spec_path, resume=True)
    with attempt(spec_path, resume=False):
        assert Fork.of(run.path) is None
