"""What a reward function keeps to itself while it is tried."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from workers.grading.trial_watch import TrialWatch

REWARD = """
def score(row):
    try:
        float(row["amswer"])
    except KeyError:
        pass
    return row.get("points") or len(list(iter(row)))
"""


def reward(folder: Path) -> ModuleType:
    path = folder / "tried.py"
    path.write_text(REWARD)
    spec = importlib.util.spec_from_file_location("tried", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_errors_that_are_caught_and_columns_that_are_not_there_are_told(tmp_path: Path) -> None:
    module, watch = reward(tmp_path), TrialWatch(str(tmp_path))
    with watch:
        assert module.score(watch.row({"answer": "1", "source": "x"})) == 2
    said = {"caught": ["KeyError: 'amswer' (tried.py:4)"], "missed": ["amswer", "points"], "changed": []}
    report = watch.report()
    assert said == {name: report[name] for name in said}
    assert report["read"] == ["amswer", "points"]
    assert 0 < report["seconds"] < 1


def test_what_a_call_changes_below_its_copy_of_the_row_is_told() -> None:
    watch = TrialWatch("/nowhere")
    with watch:
        row = watch.row({"answer": "1", "tests": [1, 2], "kept": [1]}).copy()
        row["answer"] = "2"  # of the copy alone
        row["tests"].pop()
    assert watch.report()["changed"] == ["tests"]


def test_a_row_on_trial_is_a_row() -> None:
    """With the errors of a run."""
    row = TrialWatch("/nowhere").row({"answer": "1"})
    assert row == {"answer": "1"} == row.copy()
    assert row.get("points", 2) == 2
    with pytest.raises(AttributeError, match=r"^'dict' object has no attribute 'answer'$"):
        row.answer  # noqa: B018
