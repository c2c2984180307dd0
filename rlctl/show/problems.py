"""Print errors and warnings, each with its hint, in the same words and colours in every command."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from rlctl.show.screen import Screen
from specs.errors import Problem

_COLOURS = {"error": "bold red", "warning": "bold yellow", "hint": "bold cyan"}
_FEW = 3  # problems that get a paragraph each


def print_problems(screen: Screen, word: str, problems: Sequence[Problem]) -> None:
    """Print `error: …`, a blank line and `hint: …` for each problem, or many problems by their reasons, a line each."""
    if len(problems) <= _FEW:
        for problem in problems:
            _print(screen, _label(word), f" {problem.text}")
            if problem.hint:
                _print(screen, "\n", _label("hint"), f" {problem.hint}")
            screen.print()
        return
    reasons: dict[str, list[Problem]] = {}
    for problem in problems:
        reasons.setdefault(problem.message, []).append(problem)
    for reason, alike in reasons.items():
        if len(alike) == 1:
            _print(screen, _label(word), f" {alike[0].text}", *_hint(alike[0]))
            continue
        _print(screen, _label(word), f" {reason}")
        for problem in alike:
            _print(screen, f"  {problem.subject}", *_hint(problem))
    screen.print()


def _hint(problem: Problem) -> tuple[str | tuple[str, str], ...]:
    return (" · ", _label("hint"), f" {problem.hint}") if problem.hint else ()


def _label(word: str) -> tuple[str, str]:
    return f"{word}:", _COLOURS[word]


def _print(screen: Screen, *parts: str | tuple[str, str]) -> None:
    screen.print(Text.assemble(*parts), soft_wrap=True)
