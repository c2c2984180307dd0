"""`model.path = "runs/warm"`: a run begins with the last proven weights of another, and says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from small_spec import raw_spec

from rlctl.models.paths import BUILTIN_FOLDER
from rlctl.run.run_exports import with_run_exports
from rlctl.run.run_lock import RunLock
from specs.schema.recipes import RlSpec

TINY = str(BUILTIN_FOLDER / "tiny-digits")


def a_run(folder: Path, steps: dict[int, Any], *roles: str, engine: str = "ddp") -> Path:
    """Write what is read of a run: `steps` says whether each has its proof."""
    for step, proven in steps.items():
        manifest = {"proven": proven, "engine": engine, "roles": {role: {"model_path": TINY} for role in roles}}
        (folder / "checkpoints" / f"step_{step:06d}").mkdir(parents=True)
        (folder / "checkpoints" / f"step_{step:06d}" / "manifest.json").write_text(json.dumps(manifest))
    folder.mkdir(exist_ok=True)
    (folder / "resolved.json").write_text("{}")
    return folder


def spec_of(**sections: Any) -> RlSpec:
    return RlSpec.model_validate(raw_spec(model={"path": TINY, "from_scratch": False}, **sections))


@pytest.mark.parametrize(
    ("learned", "section", "taken"),
    [
        (("actor", "critic"), "ref", "actor"),
        (("actor", "critic"), "critic", "critic"),
        (("reward_model",), "critic", "reward_model"),
        (("actor",), "critic", "actor"),
        (("reward_model",), "reward_model", "reward_model"),
        (("actor", "critic"), "reward_model", "critic"),
    ],
)
def test_whose_weights_a_role_takes(tmp_path: Path, learned: tuple[str, ...], section: str, taken: str) -> None:
    a_run(tmp_path / "runs" / "a", {4: True, 8: True, 12: False}, *learned)
    for named, step in (("runs/a", 8), ("runs/a@4", 4)):
        spec, problems = with_run_exports(spec_of(**{section: {"model": named}}), tmp_path)
        assert not problems
        assert getattr(spec, section).model == f"runs/a/exports/{taken}_step_{step:06d}"
        assert spec.model.path == TINY


@pytest.mark.parametrize(
    ("steps", "roles", "options", "named", "message", "hint"),
    [
        ({}, (), {}, "a", "has no checkpoint", "checkpoint.every"),
        ({4: True}, ("actor",), {}, "a@5", "has no checkpoint of step 5", "it has: 4"),
        ({4: False}, ("actor",), {}, "a", "without the proof", "resume that run"),
        ({4: True}, ("reward_model",), {}, "a", "trained the reward model", "a run that trained the actor"),
        ({4: True}, ("actor",), {"engine": "fake"}, "a", "engine is fake", "ddp"),
    ],
)
def test_a_run_that_cannot_be_a_model_is_refused(
    tmp_path: Path, steps: dict, roles: tuple, options: dict, named: str, message: str, hint: str
) -> None:
    a_run(tmp_path / "a", steps, *roles, **options)
    _, (problem,) = with_run_exports(spec_of(ref={"model": named}), tmp_path)
    assert (problem.key, problem.value) == ("ref.model", f'"{named}"')
    assert message in problem.message
    assert hint in problem.hint


def test_a_run_that_goes_on_is_refused_but_for_a_step(tmp_path: Path) -> None:
    lock = RunLock(a_run(tmp_path / "a", {4: True}, "actor"), "")
    try:
        _, (problem,) = with_run_exports(spec_of(ref={"model": "a"}), tmp_path)
        assert "still written by another rlctl" in problem.message
        assert 'name a step: "a@4"' in problem.hint
        assert with_run_exports(spec_of(ref={"model": "a@4"}), tmp_path)[1] == []
    finally:
        lock.release()


def test_a_resume_keeps_what_was_taken_unless_another_step_is_named(tmp_path: Path) -> None:
    a_run(tmp_path / "a", {4: True, 8: True}, "actor")
    first = tmp_path / "b"
    first.mkdir()
    (first / "resolved.json").write_text(json.dumps({"ref": {"model": "a/exports/actor_step_000004"}}))
    for named, taken in (("a", 4), ("a/", 4), ("a@4", 4), ("a@8", 8)):
        spec, _ = with_run_exports(spec_of(ref={"model": named}), tmp_path, first)
        assert Path(getattr(spec, "ref").model) == Path(f"a/exports/actor_step_{taken:06d}")  # noqa: B009
