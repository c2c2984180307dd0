"""What is said before a run of data of reasoning-gym: rows are made by the reward role's interpreter."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from small_spec import raw_spec

from rlctl.preflight.data_files import check_data
from specs.errors import Problem
from specs.load.load import spec_from
from workers.data import gym_rows

STAND_IN = Path(__file__).resolve().parents[2] / "support" / "gym_packages"


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gym_rows, "_making", {})


def found(folder: Path, train: str, *overrides: str, **reward: Any) -> list[Problem]:
    reward = {"terms": [{"kind": "reasoning_gym"}], "env": {"PYTHONPATH": str(STAND_IN)}, **reward}
    limits = {"max_prompt_tokens": 100}
    raw = raw_spec(data={"train": f"reasoning-gym:{train}", **limits}, reward=reward)
    spec = spec_from(raw, ["model.path=builtin:tiny-bytes", *overrides])
    errors, warnings = check_data(spec, folder)
    return [*errors, *warnings]


def test_rows_are_looked_at_as_those_of_a_file(tmp_path: Path) -> None:
    assert found(tmp_path, "tiny_sum") == []
    (problem,) = found(tmp_path, "tiny_sum?size=5", "data.max_prompt_tokens=3")
    assert problem.key == "data.max_prompt_tokens"
    assert "all of the first 5 prompts of reasoning-gym:tiny_sum?size=5 are longer" in problem.message
    (problem,) = found(tmp_path, "tiny_sum?size=5", "eval.every=1", "eval.prompts=5")
    assert (problem.key, "none of the 5 rows" in problem.message) == ("eval.prompts", True)


def test_what_cannot_be_made_stands_at_its_key(tmp_path: Path) -> None:
    (problem,) = found(tmp_path, "tinysum")
    assert (problem.key, problem.hint) == ("data.train", 'did you mean "reasoning-gym:tiny_sum"?')
    (problem,) = found(tmp_path, "tiny_sum", "eval.every=1", "eval.data=reasoning-gym:tiny_sum?terms=1")
    assert (problem.key, "terms must be > 1" in problem.message) == ("eval.data", True)


def test_the_reward_roles_interpreter_is_asked(tmp_path: Path) -> None:
    other = tmp_path / "python"
    other.write_text(f'#!/bin/sh\nPYTHONPATH="{STAND_IN}:$PYTHONPATH" exec {sys.executable} "$@"\n')
    (tmp_path / "reasoning_gym.py").write_text("raise ModuleNotFoundError('no', name='reasoning_gym')")
    other.chmod(0o755)
    assert found(tmp_path, "tiny_sum", python="python", env={}) == []
    (problem,) = found(tmp_path, "tiny_sum", env={"PYTHONPATH": str(tmp_path)})
    assert (problem.key, "pip install reasoning-gym" in problem.hint) == ("data.train", True)
