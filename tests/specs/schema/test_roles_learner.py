"""A role that learns, added to a real run: a row, a section and a worker file, and none of our files is changed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import toy_learner
from running import REPO, preset

from rlctl.check.meaning import roles as described
from rlctl.processes.placement import make_plan
from rlctl.run.resume import differences
from rlctl.run.train import train
from specs.errors import SpecError
from specs.load import keys
from specs.load.load import load_spec
from specs.schema import recipes, roles


@pytest.fixture
def spec_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The preset `fake` with a coach, on devices that all take turns on."""
    monkeypatch.setitem(roles.ROLES, "coach", toy_learner.ROW)
    monkeypatch.setitem(recipes.RECIPES, "rl", toy_learner.SpecWithCoach)
    keys.homes.cache_clear()
    path = preset("fake", tmp_path)
    support = REPO / "tests" / "support"
    coach = f'[coach]\nengine = {{ kind = "fake" }}\nenv = {{ PYTHONPATH = "{support}" }}\noptimizer = {{ lr = 0.1 }}\n'
    path.write_text(path.read_text().replace('name = "fake"', 'name = "fake"\ncolocate = "always"') + coach)
    yield path
    keys.homes.cache_clear()


@pytest.mark.usefixtures("warm_children")
def test_it_is_trained_beside_the_actor_saved_and_resumed(spec_path: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(spec_path, ["run.steps=2"], run, resume=False)
    (built,) = json.loads((run / "as_built.json").read_text())["coach"]
    assert built["engine"] == "fake"
    assert built["model"]["trainable_parameters"] == built["model"]["parameters"]
    saved = run / "checkpoints" / "step_000002"
    assert any((saved / "coach").iterdir())
    files = json.loads((saved / "manifest.json").read_text())["files"]
    assert {name.split("/")[0] for name in files} == {"actor", "coach", "driver"}
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert {"mem/coach_offloaded_GiB", "mem/coach_onloaded_GiB", "mem/actor_onloaded_GiB"} <= last.keys()

    train(spec_path, ["run.steps=3"], run, resume=True)
    log = (run / "logs" / "attempt_2" / "coach" / "rank0.log").read_text()
    assert f"loaded {saved / 'coach'}" in log


def test_every_question_about_roles_has_its_answer(spec_path: Path, tmp_path: Path) -> None:
    spec = load_spec(spec_path, ["coach.engine.kind=fake", "coach.threads=1"])
    assert spec.roles == ("data", "reward", "rollout", "actor", "coach")
    assert roles.build_waves(spec.roles) == [["data", "reward", "rollout"], ["actor", "coach"]]
    plan = make_plan(spec, tmp_path)
    assert plan.role("coach").command[-2:] == ("--module", "toy_learner:handlers")
    assert described(spec, plan, tmp_path)["coach"]["engine"] == "fake"
    assert differences(spec.resolved(), load_spec(spec_path, ["coach.optimizer.lr=1.0"]).resolved())[0] == [
        "coach.optimizer.lr: 0.1 → 1.0",
    ]


def test_rules_know_it_too(spec_path: Path) -> None:
    broken = ["coach.engine.kind=ddp", "coach.micro_batch_tokens=4", "coach.processes=3", "coach.nodes=2"]
    with pytest.raises(SpecError) as refused:
        load_spec(spec_path, broken)
    named = {problem.key for problem in refused.value.problems}
    assert named >= {"coach.engine.kind", "coach.micro_batch_tokens", "coach.processes", "coach.launcher"}
    with pytest.raises(SpecError, match=r"coach\.optimiser = 1: unknown key\s+hint: did you mean `optimizer`"):
        load_spec(spec_path, ["coach.optimiser=1"])
