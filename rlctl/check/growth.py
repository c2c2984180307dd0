"""How long grading takes with the length of a completion: patterns that backtrack take seconds for a hundred
characters, and for ever for a completion of usual length."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator, Sequence

from specs.errors import Problem
from specs.schema.rewards import Regex
from specs.schema.spec import Spec
from specs.text import show
from workers.grading.pattern_example import example

_UNITS = ("a", "a ", "1", "1,", " ", "\n", "x=1+", "(")
_HEADS = ("", "<think>", "<answer>", "\\boxed{")
_SHORTEST, _LONGEST = 12, 4000  # characters
_SLOW_S = 0.03  # of the processor, from which on growth can be told from noise
_TOKEN = 4  # characters
_FOR_EVER_S = 1e6
_HINT = (
    "a pattern that repeats what repeats, or .* several times, tries every way to cut the text: make the parts distinct"
)

Slow = tuple[str, float, float]  # a completion, the seconds that it took, and those that one of full length would


def slowest_growth(
    seconds: Callable[[str], float | None], *, max_tokens: int, limit_s: float, until_s: float
) -> Slow | None:
    """The first completion that takes long, where one of `max_tokens` would take more than `limit_s`. `seconds`: of the
    processor for a completion, None where it does not end. `until_s`: so many of them together, or four times as many
    of the clock, after which no more are tried."""
    deadline, full, before = time.monotonic() + 4 * until_s, max_tokens * _TOKEN, dict[int, tuple[int, float]]()
    spent = 0.0
    for length in _lengths(min(full, _LONGEST)):
        for number, text in enumerate(_texts(length)):
            if (one := seconds(text)) is None:
                return text, math.inf, math.inf
            if one > _SLOW_S and number in before and (at_full := _at(full, len(text), one, *before[number])) > limit_s:
                return text, one, at_full
            before[number] = (len(text), one)
            spent += one
            if spent > until_s or time.monotonic() > deadline:
                return None
    return None


def _at(full: int, length: int, took: float, shorter: int, before: float) -> float:
    """Seconds at full length, by the power of the length that the last two took."""
    power = math.log(took / max(before, 1e-6)) / math.log(length / shorter)
    return float(min(took * (full / length) ** min(power, 40.0), 1e9)) if full > length and power > 1.5 else took


def _lengths(longest: int) -> Iterator[int]:
    length = _SHORTEST
    while length <= longest:
        yield length
        length += max(2, length // 3) if length < _LONGEST // 100 else length


def _texts(length: int) -> Iterator[str]:
    for head in _HEADS:
        for unit in _UNITS:
            yield head + (unit * length)[:length] + "!"


def slow_pattern(pattern: str, *, max_tokens: int, limit_s: float) -> Slow | None:
    """The same for a search with a pattern, also behind the beginning of a match."""
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except re.error:  # which is said elsewhere
        return None
    found = example(pattern, "a") or ""

    def seconds(texts: Sequence[str]) -> Iterator[float]:
        for text in (*texts, *(found[: len(found) // 2] + text for text in texts[: len(_UNITS)])):
            began = time.thread_time()
            compiled.search(text)
            took = time.thread_time() - began
            yield took
            if took > _SLOW_S:
                return

    for length in _lengths(min(max_tokens * _TOKEN, _LONGEST)):
        texts = [*_texts(length)]
        took = [*seconds(texts)]
        if took[-1] > _SLOW_S:
            text = (texts * 2)[len(took) - 1]
            shorter = text[: len(text) * 3 // 4] + "!"
            began = time.thread_time()
            compiled.search(shorter)
            at_full = _at(max_tokens * _TOKEN, len(text), took[-1], len(shorter), time.thread_time() - began)
            return (text, took[-1], at_full) if at_full > limit_s else None
    return None


def said_of(name: str, slow: Slow, limit_s: float) -> tuple[str, str]:
    """What is wrong, and a hint."""
    text, took, at_full = slow
    shown = f"{len(text)} characters such as {show(text, 30)}"
    if took == math.inf:
        return f"{name} does not end for a completion of {shown}", _HINT
    long = "for ever" if at_full > _FOR_EVER_S else f"{at_full:.0f} s"
    message = f"{name} takes {took:.2g} s for {shown}, and would take {long} for a completion of full length"
    return f"{message} (reward.timeout_s = {limit_s:g})", _HINT


def pattern_warnings(spec: Spec) -> Iterator[Problem]:
    """Patterns of the reward that are searched for too long."""
    for index, term in enumerate(spec.reward.terms):
        if isinstance(term, Regex):
            limit_s = spec.reward.timeout_s
            slow = slow_pattern(term.pattern, max_tokens=spec.data.max_response_tokens, limit_s=limit_s)
            if slow:
                yield Problem(f"reward.terms.{index}.pattern", *said_of("it", slow, limit_s), show(term.pattern))
