"""Run directories: one run at a time, numbered attempts, no silent change of the spec."""

import json

import pytest

from rlctl.run.lineage import Fork
from rlctl.run.run_dir import RunDir
from specs.errors import RunDirError
from specs.load.load import load_spec


@pytest.fixture
def spec_path(tmp_path):
    from importlib.resources import files

    path = tmp_path / "spec.toml"
    path.write_text((files("specs") / "presets" / "fake.toml").read_text())
    return path


def test_attempts_are_numbered_and_nothing_is_overwritten(tmp_path, spec_path):
    spec = load_spec(spec_path)
    first = RunDir(tmp_path / "run")
    first.open(spec, spec_path, resume=False)
    assert first.attempt == 1
    assert (first.path / "spec.toml").read_bytes() == spec_path.read_bytes()
    first.metrics.write_text('{"step": 1}\n')
    first.release()
    second = RunDir(tmp_path / "run")
    second.open(load_spec(spec_path, ["run.steps=99"]), spec_path, resume=True)
    assert (second.attempt, second.logs.name) == (2, "attempt_2")
    assert second.changes == ["run.steps: 6 → 99"]
    second.release()
    for steps, told in ((99, []), (7, ["run.steps: 99 → 7"]), (6, ["run.steps: 7 → 6"])):  # against the last attempt
        again = RunDir(tmp_path / "run")
        again.open(load_spec(spec_path, [f"run.steps={steps}"]), spec_path, resume=True)
        assert again.changes == told
        again.release()


def test_keys_that_came_after_an_older_rlctl_began_the_run_have_their_defaults(tmp_path, spec_path):
    first = RunDir(tmp_path / "run")
    first.open(load_spec(spec_path), spec_path, resume=False)
    first.metrics.write_text('{"step": 1}\n')
    first.release()
    before = json.loads(first.resolved.read_text())
    del before["environment"], before["rollout"]["in_flight"], before["algorithm"]["scale"]
    del before["reward"]["terms"][0]["ignore_case"], before["data"]["tools_column"]
    first.resolved.write_text(json.dumps(before))
    again = RunDir(tmp_path / "run")
    again.open(load_spec(spec_path), spec_path, resume=True)
    assert again.changes == []
    again.release()
    with pytest.raises(RunDirError, match=r"differs .*\n  - algorithm\.scale: unset → \"none\""):
        RunDir(tmp_path / "run").open(load_spec(spec_path, ["algorithm.scale=none"]), spec_path, resume=True)


def test_refusals_change_nothing(tmp_path, spec_path):
    spec = load_spec(spec_path)
    with pytest.raises(RunDirError, match="no run to resume"):
        RunDir(tmp_path / "run").open(spec, spec_path, resume=True)
    assert not (tmp_path / "run").exists()
    run = RunDir(tmp_path / "run")
    run.open(spec, spec_path, resume=False)
    run.metrics.write_text('{"step": 1}\n')
    run.release()
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
    run = RunDir(tmp_path / "run")
    run.open(load_spec(spec_path), spec_path, resume=False)
    run.as_built.write_text("{}")
    run.release()
    again = RunDir(tmp_path / "run")
    again.open(load_spec(spec_path, ["run.seed=5"]), spec_path, resume=False)
    assert again.attempt == 2
    assert not again.as_built.exists()
    assert '"seed": 5' in (again.path / "resolved.json").read_text()
    again.release()


def test_a_fork_that_never_made_a_step_leaves_nothing_to_a_plain_run(tmp_path, spec_path):
    spec, run = load_spec(spec_path), RunDir(tmp_path / "run")
    run.open(spec, spec_path, resume=False)
    Fork(tmp_path / "other", 4).write(run.path)
    run.release()
    for resume, of in ((True, Fork(tmp_path / "other", 4)), (False, None)):
        again = RunDir(tmp_path / "run")
        again.open(spec, spec_path, resume=resume)
        again.release()
        assert Fork.of(run.path) == of
