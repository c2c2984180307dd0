"""Each case of the corpus gives its problems, all at once and each with a hint; a sound spec gives none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from corpus import CHECKED, KEYS, PROBED, Case, assert_problems, cases, packages, write_case
from families import FAMILIES

from rlctl.check.findings import Findings, examine

pytestmark = pytest.mark.usefixtures("warm_children")

CASES = dict(cases())


@pytest.fixture
def findings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Case], Findings]:
    """Return what finds the problems of a case, laid out in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))

    def found(case: Case) -> Findings:
        with packages(case.get("absent", ())):
            return examine(write_case(case, tmp_path), case.get("override", []))

    return found


@pytest.mark.parametrize("name", CASES)
def test_a_broken_spec_gives_its_message(name: str, findings: Callable[[Case], Findings]) -> None:
    case: Case = CASES[name]
    found, also = findings(case), case.get("also", [])
    assert_problems(case.get("errors", {}), [problem for problem in found.problems if problem.key not in also])
    if "warnings" in case or "sound" in case:
        assert_problems(case.get("warnings", {}), found.warnings)


def test_the_base_of_the_corpus_is_sound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for case in ({}, {"model": {}, "set": {"model.path": "./model", "model.from_scratch": False}}):
        found = examine(write_case(case, tmp_path), ())
        assert (found.problems, found.warnings) == ([], [])


def test_no_case_stands_twice() -> None:
    assert len(CASES) >= 150
    assert sum("sound" in case for case in CASES.values()) >= 10
    seen: list[Case] = []
    for case in CASES.values():
        assert case not in seen, case
        assert case.keys() <= KEYS, case
        assert any(kind in case for kind in (*CHECKED, *PROBED, "sound")), case
        seen.append(case)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_that_runs_is_not_refused(name: str, findings: Callable[[Case], Findings]) -> None:
    """Of the models of `families.py` none is."""
    config = FAMILIES[name].config
    found = findings({"set": {"model.path": "./model"}, "model": {"config.json": json.dumps(config)}})
    assert_problems({}, found.problems)
