"""Errors and warnings on the screen: a few in paragraphs, many by their reasons."""

from __future__ import annotations

import pytest

from rlctl.show.problems import print_problems
from rlctl.show.screen import Screen
from specs.errors import Problem

STEPS = Problem("run.steps", "must be greater than 0", "use 1", "0")


def test_a_few_get_a_paragraph_each(capsys: pytest.CaptureFixture[str]) -> None:
    print_problems(Screen(), "error", [STEPS, Problem("", "no such file")])
    assert capsys.readouterr().out == (
        "error: run.steps = 0: must be greater than 0\n\nhint: use 1\n\nerror: no such file\n\n"
    )


def test_many_get_a_line_each_below_their_reason(capsys: pytest.CaptureFixture[str]) -> None:
    unknown = [Problem(f"run.key_{number}", "unknown key", "remove it", str(number)) for number in range(30)]
    print_problems(Screen(), "error", [unknown[0], STEPS, *unknown[1:]])
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["error: unknown key", "  run.key_0 = 0 · hint: remove it"]
    assert lines[-2] == "error: run.steps = 0: must be greater than 0 · hint: use 1"
    assert len(lines) == 33
