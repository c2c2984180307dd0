"""The term `reasoning_gym`, in the grading processes, by the stand-in for the package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specs.builtin_tasks import gym_entry_as_json
from specs.errors import RewardError
from specs.packages import package_path
from workers.grading.pool import GraderPool
from workers.grading.terms import GradeRequest, Setting

STAND_IN = Path(__file__).resolve().parents[2] / "support" / "gym_packages"


def pool(folder: Path, packages: Path) -> GraderPool:
    return GraderPool(
        [{"kind": "reasoning_gym"}],
        Setting("answer", 8, "."),
        workers=1,
        timeout_s=60.0,
        log_path=folder / "log",
        env={"PYTHONPATH": package_path(str(packages))},
    )


def row(*numbers: int, options: dict[str, Any]) -> dict[str, Any]:
    entry = {"question": "", "answer": str(sum(numbers)), "metadata": {"numbers": numbers, "by": {1: "a"}}}
    gym = {"name": "tiny_sum", "options": options, "entry": gym_entry_as_json(entry)}
    return {"prompt": "", "answer": entry["answer"], "reasoning_gym": gym}


def test_completions_are_scored_by_their_data_set(tmp_path: Path) -> None:
    two, three = row(1, 2, options={}), row(1, 2, 3, options={"terms": 3})
    asked = [
        (two, " 3\n", 1.0),
        (two, "4", 0.0),
        (two, "I first took <answer>4</answer>, but it is <answer> 3 </answer>", 1.0),
        (three, "6", 1.0),
        (three, "not a number, at which this data set raises", 0.0),
        (three, "", 0.0),
    ]
    requests = [GradeRequest(key, "", values, text, 1) for key, (values, text, _) in enumerate(asked)]
    with pool(tmp_path, STAND_IN) as graders:
        grades = graders.grade(requests)
        (broken,) = graders.grade([GradeRequest(0, "", row(1, 2, 3, options={}), "6", 1)])
    assert [grade.values for grade in grades] == [(score,) for _, _, score in asked]
    assert broken.cause == "exceptions", "the row is at fault, not the completion"


def test_a_package_that_is_not_there_is_named(tmp_path: Path) -> None:
    (tmp_path / "reasoning_gym.py").write_text("raise ModuleNotFoundError('no', name='reasoning_gym')")
    with pool(tmp_path, tmp_path) as graders, pytest.raises(RewardError) as caught:
        graders.wait_ready()
    assert "pip install reasoning-gym" in caught.value.hint
