"""What the scores tell that a reward function gives completions such as a policy writes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specs.text import show
from workers.grading.reward_failures import last_line

# Errors that tell of the function's code or of its machine, not of what a completion says.
_OF_THE_FUNCTION = ("NameError", "UnboundLocalError", "ImportError", "ModuleNotFoundError", "TypeError", "KeyError")
_OF_THE_MACHINE = ("FileNotFoundError", "PermissionError", "ConnectionRefusedError", "URLError", "OSError")
_ALWAYS_WRONG = ("NameError", "UnboundLocalError")

Said = tuple[str, str]  # what is wrong, and a hint


@dataclass(frozen=True)
class Try:
    """One call. `right`: whether the completion says the row's own answer. `value` is None where it gave no score, and
    `failure` says why. `caught`: errors that it raised and caught; `missed`: columns that the row has not."""

    completion: str
    right: bool
    value: float | None
    failure: str = ""
    caught: tuple[str, ...] = ()
    missed: tuple[str, ...] = ()


def a_try(completion: str, right: bool, line: Mapping[str, Any]) -> Try:
    """What the grader's line says of a call."""
    value = line["t"][0] if "t" in line else None
    caught, missed = (tuple(line.get(name, ())) for name in ("caught", "missed"))
    return Try(completion, right, value, "" if value is not None else last_line(str(line["text"])), caught, missed)


def trial_findings(name: str, tries: Sequence[Try], *, weight: float, alone: bool) -> Iterator[Said]:
    """At most one thing that is wrong with the function. `tries`: the row's own answer, an empty completion, and then
    likely ones. `alone`: no other term gives a reward."""
    failed = [one for one in tries[2:] if one.failure]
    hidden = [error for one in tries for error in one.caught if error.startswith(_ALWAYS_WRONG)]
    if failed:
        message = f"{name}, called with the completion {show(failed[0].completion, 40)}, gives no score"
        yield (
            f"{message}: {failed[0].failure}",
            "return a number whatever the model writes, 0.0 for what cannot be read",
        )
    elif hidden:
        yield f"{name} catches an error of its own code: {hidden[0]}", "repair it, and catch only what you expect"
    elif all(one.value == tries[0].value for one in tries):
        yield from _always_the_same(name, tries)
    elif chance := _by_chance(tries):
        message = f"{name} gives the same completion {chance[0]:g}, and then {chance[1]:g}: it scores by chance"
        yield message, "let the score depend on the completion and its row alone"
    elif alone:
        yield from _likes_wrong(name, tries, weight)


def _by_chance(tries: Sequence[Try]) -> tuple[float, float] | None:
    """Two scores of one completion."""
    seen: dict[str, float] = {}
    for one in tries[2:]:
        assert one.value is not None
        if seen.setdefault(one.completion, one.value) != one.value:
            return seen[one.completion], one.value
    return None


def _always_the_same(name: str, tries: Sequence[Try]) -> Iterator[Said]:
    """A score that nothing changes, where the function says why: the same error each time, or a column not there."""
    message = f"{name} gives {tries[0].value:g} to each of {len(tries)} completions, right ones among them"
    if not any(one.right for one in tries):
        return
    errors = set(tries[0].caught).intersection(*(one.caught for one in tries))
    if told := sorted(error for error in errors if error.startswith((*_OF_THE_FUNCTION, *_OF_THE_MACHINE))):
        yield f"{message}, and catches {told[0]} each time", "repair it, and catch only what you expect"
        return
    missed = set(tries[0].missed).intersection(*(one.missed for one in tries))
    if missed:
        yield f"{message}, and asks the row for {show(min(missed))}, which it has not", "name a column of the data"


def _likes_wrong(name: str, tries: Sequence[Try], weight: float) -> Iterator[Said]:
    """The row's own answer gets less than anything wrong, and no other form of it gets more."""
    own, *values = (weight * (one.value or 0.0) for one in tries)
    wrong = [value for value, one in zip(values, tries[1:], strict=True) if not one.right]
    right = [own, *(value for value, one in zip(values, tries[1:], strict=True) if one.right)]
    texts = {weight * (one.value or 0.0) for one in tries if one.completion}
    if len(right) > 1 and len(texts) == 1 and own > values[0]:
        message = f"{name} gives {tries[0].value:g} to each of {len(tries) - 1} texts, right ones and wrong ones"
        yield message, "a model learns to say anything at all: check the comparison"
    elif len(right) > 1 and own < min(wrong) and max(right) <= min(wrong):
        message = f"{name} gives a row's own answer {tries[0].value:g}, and an empty completion {tries[1].value:g}"
        yield f"{message}: with this weight a right completion lowers the reward", "check the comparison and the weight"
