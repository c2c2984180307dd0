"""Where in a completion a reward function looks for the answer: within other numbers too, or only where a completion
begins."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from rlctl.check.reward_trial import Finding, Try
from specs.text import show
from workers.grading.trial_completions import longer_numbers, near_numbers, with_thoughts

_MOST = 6  # forms of the answer
_NOTHING = "I am not sure."
_WORDS = "I think about it first."

Scores = Callable[[Sequence[str]], Sequence[float] | None]  # of completions; None where one has none


def within_numbers(name: str, better: Sequence[Try], golds: Sequence[str], scores: Scores) -> Iterator[Finding]:
    """Numbers that hold the answer's digits and score as it does. `better`: right completions, best first; `golds`: of
    rows, the first of which they are of."""
    own, lengths = golds[0], {len(gold) for gold in golds}
    if not all(re.fullmatch(r"-?\d+", gold) for gold in golds):
        return
    for one in [one for one in better if one.value == better[0].value][:_MOST]:
        texts = [one.completion.text.replace(own, number) for number in (*longer_numbers(own), *near_numbers(own))]
        if (values := scores([*texts, _NOTHING])) is None:
            return
        as_good = [value >= (one.value or 0.0) for value in values[:2]]
        shares = max(values[2:4]) > values[4]  # of the digits that are right
        # A function that looks for so many digits, or for the number of a choice, is right of one of them.
        if all(as_good) or (any(as_good) and len(lengths) > 1 and len(own) > 1 and not shares):
            text = texts[as_good.index(True)]
            message = f"{name} gives {show(text, 40)} {one.value:g}, as much as {show(one.completion.text, 40)}"
            yield f"{message}: it looks for the digits of the answer", "compare whole numbers, such as the last one"
            return


def only_at_the_start(
    name: str, better: Sequence[Try], own: str, other: str, scores: Scores, *, asked: bool, stops: Sequence[str]
) -> Iterator[Finding]:
    """A function that likes no completion with thoughts before the answer. `other`: another row's answer; `asked`:
    whether prompts ask for thoughts; where they only leave room for them, the answer alone is not looked at."""
    forms = [one.completion.text for one in better if asked or one.completion.text.strip() != own][:_MOST]
    one, two, *_ = [*(digit for digit in "123456789" if digit not in own + other), "", ""]
    numbers = f"First {one}{two}, then {two}{one}."
    if not forms or not two:
        return
    likes: dict[str, str] = {}
    for thoughts in (numbers, _WORDS):
        for form in forms:
            texts = [text for text in with_thoughts(form, own, thoughts) if not any(stop in text for stop in stops)]
            values = scores([said for text in texts for said in (text, _with(text, own, other))])
            if not texts or values is None:
                return
            liked = [text for text, right, wrong in zip(texts, values[::2], values[1::2], strict=True) if right > wrong]
            if liked and thoughts == numbers:
                return
            likes |= {form: liked[0]} if liked else {}
    form = next(iter(likes), forms[0])
    thoughtful = next(with_thoughts(form, own, numbers))
    message = f"{name} likes {show(form, 30)}, and not {show(thoughtful, 50)}, and a model thinks before it answers"
    if likes:
        yield f"{message}: it takes the first number", "take the last: re.findall(...)[-1]"
    else:
        yield f"{message}: nothing may stand before", "search in the whole completion, and take what is found last"


def _with(text: str, own: str, other: str) -> str:
    head, tail = text[: text.rindex(own)], text[text.rindex(own) + len(own) :]
    return f"{head}{other}{tail}"
