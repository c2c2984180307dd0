"""What the scores tell that a reward function gives completions such as a policy writes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from specs.text import show
from workers.grading.reward_failures import last_line
from workers.grading.trial_completions import Said

# Errors that tell of the function's code or of its machine, not of what a completion says.
_OF_THE_FUNCTION = ("NameError", "UnboundLocalError", "ImportError", "ModuleNotFoundError", "TypeError", "KeyError")
_OF_THE_MACHINE = ("FileNotFoundError", "PermissionError", "ConnectionRefusedError", "URLError", "OSError")
_ALWAYS_WRONG = ("NameError", "UnboundLocalError")

_NOTHING_TO_LEARN = "where all score the same nothing is learned: check what it looks for"

Finding = tuple[str, str]  # what is wrong, and a hint


@dataclass(frozen=True)
class Try:
    """One call with a completion. `value` is None where it gave no score, and `failure` says why. `caught`: errors that
    it raised and caught; `missed`: columns that the row has not; `read`: those that it asked the row for; `changed`:
    those that it changed; `opened`: files that it read by a path relative to the working folder."""

    completion: Said
    value: float | None
    failure: str = ""
    caught: tuple[str, ...] = ()
    missed: tuple[str, ...] = ()
    read: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    opened: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def right(self) -> bool:
        return self.completion.right


@dataclass(frozen=True)
class OfColumns:
    """What a function is given besides the completion. `answer`: the column that holds the row's answer; `has`: columns
    of the row that are not the prompt's; `given`: those that its parameters are, `all_of_them` where it takes any."""

    answer: str
    has: frozenset[str] = frozenset()
    given: frozenset[str] = frozenset()
    all_of_them: bool = False

    def only_answer(self, tries: Sequence[Try]) -> bool:
        """Whether it reads the row's answer, and nothing else that would tell what is right."""
        read = self.given.union(*(one.read for one in tries), self.has if self.all_of_them else ())
        return read & self.has == {self.answer}


def a_try(completion: Said, line: Mapping[str, Any]) -> Try:
    """What the grader's line says of a call."""
    value = line["t"][0] if "t" in line else None
    lists = {name: tuple(line.get(name, ())) for name in ("caught", "missed", "read", "changed", "opened")}
    failure = "" if value is not None else last_line(str(line["text"]))
    return Try(completion, value, failure, **lists, seconds=line.get("seconds", 0.0))


def better_than_others(tries: Sequence[Try], own: str) -> list[Try]:
    """Right completions, saying the row's `own` answer once, that score above the same with another row's; best
    first."""
    wrong = {one.completion.form: one.value or 0.0 for one in tries if not one.right and one.completion.form >= 0}
    right = [one for one in tries if one.right and own and one.completion.text.count(own) == 1]
    better = {one.completion: one for one in right if (one.value or 0.0) > wrong.get(one.completion.form, 0.0)}
    return sorted(better.values(), key=lambda one: -(one.value or 0.0))


def trial_findings(
    name: str, tries: Sequence[Try], columns: OfColumns, *, weight: float, alone: bool
) -> Iterator[Finding]:
    """At most one thing that is wrong with the scores, and what else was seen. `tries`: the row's own answer, an empty
    completion, and then likely ones. `alone`: no other term gives a reward."""
    failed = [one for one in tries[2:] if one.failure]
    hidden = [error for one in tries for error in one.caught if error.startswith(_ALWAYS_WRONG)]
    if failed:
        message = f"{name}, called with the completion {show(failed[0].completion.text, 40)}, gives no score"
        yield (
            f"{message}: {failed[0].failure}",
            "return a number whatever the model writes, 0.0 for what cannot be read",
        )
    elif hidden:
        yield f"{name} catches an error of its own code: {hidden[0]}", "repair it, and catch only what you expect"
    elif chance := _by_chance(tries):
        message = f"{name} gives the same completion {chance[0]:g}, and then {chance[1]:g}"
        message += ": it scores by chance, by the time, or by what it was called with before"
        yield message, "let the score depend on the completion and its row alone"
    elif all(one.value == tries[0].value for one in tries):
        yield from _always_the_same(name, tries, columns, alone=alone)
    elif alone and (found := next(_likes_wrong(name, tries, weight), None)):
        yield found
    elif alone and weight > 0:
        yield from islice(chain(_nothing_is_as_good(name, tries, columns), _never_better(name, tries, columns)), 1)
    yield from _beside_the_score(name, tries)


def _beside_the_score(name: str, tries: Sequence[Try]) -> Iterator[Finding]:
    """What a call does besides giving a score."""
    changed = [column for one in tries for column in one.changed]
    opened = [path for one in tries for path in one.opened]
    if changed:
        message = f"{name} changes the row's {show(changed[0])}, which all completions of the row are graded with"
        yield message, "change a copy: copy.deepcopy(row)"
    if opened:
        message = f"{name} reads {opened[0]} from the folder where rlctl is called"
        yield message, f"name it from the file's own: Path(__file__).parent / {show(opened[0])}"


def _by_chance(tries: Sequence[Try]) -> tuple[float, float] | None:
    """Two scores of one completion."""
    seen: dict[str, float] = {}
    for one in tries:
        assert one.value is not None
        if seen.setdefault(one.completion.text, one.value) != one.value:
            return seen[one.completion.text], one.value
    return None


def _always_the_same(name: str, tries: Sequence[Try], columns: OfColumns, *, alone: bool) -> Iterator[Finding]:
    """A score that nothing changes."""
    message = f"{name} gives {tries[0].value:g} to each of {len(tries)} completions, right ones among them"
    if not any(one.right and one.completion.text for one in tries):
        if alone and tries[0].value:
            yield f"{name} gives {tries[0].value:g} to each of {len(tries)} completions", _NOTHING_TO_LEARN
        return
    errors = set(tries[0].caught).intersection(*(one.caught for one in tries))
    if told := sorted(error for error in errors if error.startswith((*_OF_THE_FUNCTION, *_OF_THE_MACHINE))):
        yield f"{message}, and catches {told[0]} each time", "repair it, and catch only what you expect"
        return
    missed = set(tries[0].missed).intersection(*(one.missed for one in tries))
    if missed:
        yield f"{message}, and asks the row for {show(min(missed))}, which it has not", "name a column of the data"
    elif (alone and tries[0].value) or columns.only_answer(tries):
        yield message, _NOTHING_TO_LEARN


def _never_better(name: str, tries: Sequence[Try], columns: OfColumns) -> Iterator[Finding]:
    """A function that reads the answer, and gives no right completion more than the same with another row's."""
    wrong = {one.completion.form: one.value or 0.0 for one in tries if not one.right and one.completion.form >= 0}
    pairs = [(one, wrong[one.completion.form]) for one in tries if one.right and one.completion.form in wrong]
    if len(pairs) < 2 or not columns.only_answer(tries) or any((one.value or 0.0) > other for one, other in pairs):
        return
    message = f"{name} gives none of {len(pairs)} right completions more than the same with another row's answer"
    shown = show(pairs[0][0].completion.text, 40)
    yield f"{message}, such as {shown}: {pairs[0][0].value:g}, and {pairs[0][1]:g}", "check how the two are compared"


def _nothing_is_as_good(name: str, tries: Sequence[Try], columns: OfColumns) -> Iterator[Finding]:
    """An empty completion, or one that says something else, gets as much as any right one, and others get less."""
    right, lowest = [one.value or 0.0 for one in tries if one.right], min(one.value or 0.0 for one in tries)
    others = [tries[1]]
    if columns.only_answer(tries) and any(one.completion.form >= 0 and not one.right for one in tries):
        others += [one for one in tries[2:] if not one.right and one.completion.form < 0]
    for one in others:
        if right and (one.value or 0.0) > max(lowest, 0.0) and (one.value or 0.0) >= max(right):
            what = show(one.completion.text, 40) if one.completion.text else "an empty completion"
            message = f"{name} gives {what} {one.value:g}, as much as the best of {len(right)} right completions"
            yield message, "give what cannot be read less than what is right"
            return


def _likes_wrong(name: str, tries: Sequence[Try], weight: float) -> Iterator[Finding]:
    """The row's own answer gets less than anything wrong, and no other form of it gets more."""
    own, *values = (weight * (one.value or 0.0) for one in tries)
    wrong = [value for value, one in zip(values, tries[1:], strict=True) if not one.right]
    right = [own, *(value for value, one in zip(values, tries[1:], strict=True) if one.right)]
    texts = {weight * (one.value or 0.0) for one in tries if one.completion.text}
    if len(right) > 1 and len(texts) == 1 and own > values[0]:
        message = f"{name} gives {tries[0].value:g} to each of {len(tries) - 1} texts, right ones and wrong ones"
        yield message, "a model learns to say anything at all: check the comparison"
    elif len(right) > 1 and own < min(wrong) and max(right) <= min(wrong):
        message = f"{name} gives a row's own answer {tries[0].value:g}, and an empty completion {tries[1].value:g}"
        yield f"{message}: with this weight a right completion lowers the reward", "check the comparison and the weight"
