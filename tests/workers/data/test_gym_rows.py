"""Rows that the package reasoning-gym makes in its own process; a stand-in, and where it is installed itself."""

from __future__ import annotations

import importlib.util
import sys
import time
from itertools import islice
from pathlib import Path
from typing import Any

import psutil
import pytest
from probe_groups import wait_until

from specs.errors import DataError
from workers.data import gym_rows
from workers.data.row_source import read_rows
from workers.grading.terms import GradeRequest, Setting, make_term

STAND_IN = Path(__file__).resolve().parents[2] / "support" / "gym_packages"
INSTALLED = importlib.util.find_spec("reasoning_gym") is not None


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gym_rows, "_making", {})
    gym_rows.make_with(sys.executable, {"PYTHONPATH": str(STAND_IN)})


def rows(source: str, most: int | None = None) -> list[dict[str, Any]]:
    return [row.values for row in read_rows(f"reasoning-gym:{source}", split="", base=Path(), max_rows=most)]


def refused(source: str) -> DataError:
    with pytest.raises(DataError) as caught:
        rows(source)
    assert caught.value.hint
    return caught.value


def test_rows_are_those_of_the_seed() -> None:
    before = {*sys.modules}
    first, second = rows("tiny_sum?size=2&seed=7&terms=3")
    assert (first["prompt"], first["answer"], second["prompt"]) == ("7 + 8 + 9 =", "24", "8 + 9 + 10 =")
    assert first["reasoning_gym"]["options"] == {"terms": 3}
    assert rows("tiny_sum?seed=8", 1)[0]["prompt"] == "8 + 9 ="
    (row,) = read_rows("reasoning-gym:tiny_sum", split="", base=Path(), max_rows=1)
    assert row.where == "reasoning-gym:tiny_sum row 1"
    assert "reasoning_gym" not in {*sys.modules} - before, "this process imports nothing"


def test_what_cannot_be_made_is_refused_with_the_next_action(tmp_path: Path) -> None:
    assert refused("tinysum").hint == 'did you mean "reasoning-gym:tiny_sum"?'
    unknown = refused("tiny_sum?term=3")
    assert (unknown.message, "terms" in unknown.hint) == ("tiny_sum has no option 'term'", True)
    assert refused("tiny_sum?terms=1").message == "tiny_sum refuses its options: terms must be > 1"
    assert "ended with status 7" in refused("dying").message
    (tmp_path / "reasoning_gym.py").write_text("raise ModuleNotFoundError('no', name='reasoning_gym')")
    gym_rows.make_with(sys.executable, {"PYTHONPATH": str(tmp_path)})
    missing = refused("tiny_sum")
    assert missing.message == f"reasoning-gym is not installed for {sys.executable}"
    assert missing.hint == f"{sys.executable} -m pip install reasoning-gym"
    gym_rows.make_with(str(tmp_path / "no-python"), {})
    assert "no-python does not start" in refused("tiny_sum").message


def test_a_process_whose_rows_nobody_reads_ends() -> None:
    before, start = {*psutil.Process().children()}, time.monotonic()
    slow = gym_rows.gym_rows("reasoning-gym:slow")
    assert len([*islice(slow, 1)]) == 1
    (process,) = {*psutil.Process().children()} - before
    slow.close()
    wait_until(lambda: not process.is_running())
    assert time.monotonic() - start < 60


@pytest.mark.skipif(not INSTALLED, reason="pip install reasoning-gym")
@pytest.mark.parametrize("name", ["chain_sum", "rearc", "prime_factorization"])
def test_the_package_itself_makes_and_scores_rows(name: str) -> None:
    gym_rows.make_with(sys.executable, {})
    for row in rows(f"{name}?size=3&seed=5"):
        score = make_term({"kind": "reasoning_gym"}, Setting("answer", 8, "."))
        answer = row["answer"]
        if answer is not None:
            assert score(GradeRequest(0, "", row, f" {answer}\n", 8)) == 1.0
            assert score(GradeRequest(0, "", row, f"So it is\n<answer>{answer}</answer>.", 8)) == 1.0
        assert 0 <= score(GradeRequest(0, "", row, "none of these", 8)) < 0.5
