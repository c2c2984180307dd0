"""Completions such as a policy writes: right ones in the forms that are in use, and wrong ones."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from workers.grading.pattern_example import example

_FORMS = (
    "The answer is {}.",
    "So it is.\n\\boxed{{{}}}",
    "So it is.\n#### {}",
    "<think>\nSo it is.\n</think>\n<answer>{}</answer>",
    "<think>\nSo it is.\n</think>\n\n<answer>\n\\boxed{{{}}}\n</answer>",
    "Answer: {}",
    "```python\n{}\n```",
    '```python\nprint("{}")\n```',
    '{{"answer": "{}"}}',
)
_WRONG = (
    "I am not sure.",
    "The question is hard, and I would have to think about it for a long time before I could say anything. " * 3,
    "First 12, then 3.5 and 1/2: that makes 40 %.",
    "<think> \\boxed{ ### < [ ( é 漢 \n",
    "la la la la la la la la",
)
_AGAIN = 4  # how often one is given once more
_MOST_OF_SOURCE = 12
OWN = 10_000  # form of an answer alone
_TAG = re.compile(r"<([A-Za-z_]{2,20})>")
_THINKS = re.compile(r"think|reason|scratch|work|plan", re.IGNORECASE)


@dataclass(frozen=True)
class Said:
    """A completion. `right`: it says the row's own answer. `form`: the number of the form that it is written in; that
    of no other is negative."""

    text: str
    right: bool = False
    form: int = -1


def likely_completions(
    answer: str | None, *, other: str | None = None, source: str = "", prompt: str = ""
) -> list[Said]:
    """Completions to try for a row with this answer, besides the answer itself and an empty one. `other`: another row's
    answer, which is written in the same forms; `source`: of the file that grades; `prompt`: what the policy is asked.
    Some come more than once."""
    wrong = [Said(text) for text in _WRONG]
    if answer is None:
        return [*wrong, *(wrong[0],) * _AGAIN]
    forms = [*right_forms(answer, source=source, prompt=prompt)]
    right = [Said(text, True, number) for number, text in enumerate(forms)]
    twins = [] if other is None else [Said(other, False, OWN)]
    if other is not None:
        twins += [Said(text, False, n) for n, text in enumerate(right_forms(other, source=source, prompt=prompt))]
    return [*right, *twins, *wrong, *(Said(answer, True, OWN), wrong[0]) * _AGAIN]


def longer_numbers(number: str) -> tuple[str, str]:
    """Whole numbers that end, and that begin, with the digits of another one."""
    sign = "-" if number.startswith("-") else ""
    return f"{sign}3{number.removeprefix('-')}", f"{number}5"


def near_numbers(number: str) -> tuple[str, str]:
    """Whole numbers of which one digit is another one, the first or the last."""
    sign, digits = ("-", number[1:]) if number.startswith("-") else ("", number)
    first, last = ("3" if one != "3" else "8" for one in (digits[0], digits[-1]))
    return f"{sign}{first}{digits[1:]}", f"{sign}{digits[:-1]}{last}"


def with_thoughts(text: str, answer: str, thoughts: str) -> Iterator[str]:
    """The text with thoughts before its answer, wherever they may stand: in front of all, and behind what may begin a
    part of it."""
    end = text.rindex(answer)
    yield f"{thoughts}\n{text}"
    yield f"{thoughts} {text}"
    for place in re.finditer(r"[>:\n]\s*", text[:end]):
        yield f"{text[: place.end()]}{thoughts}\n{text[place.end() :]}"
    if text.startswith("{"):
        yield f'{{"reasoning": "{thoughts}", {text[1:]}'


def right_forms(answer: str, *, source: str = "", prompt: str = "") -> Iterator[str]:
    """The answer in forms that are in use, that the prompt shows, and that patterns in the source ask for."""
    yield from (form.format(answer) for form in _FORMS)
    tags = [*dict.fromkeys(_TAG.findall(prompt))]
    if tags:
        yield "\n".join(f"<{tag}>{'So it is.' if _THINKS.search(tag) else answer}</{tag}>" for tag in tags)
    found = [text for pattern in _patterns(source) if (text := example(pattern, answer))]
    yield from found
    if len(found) > 1:
        yield "\n".join(found)


def _patterns(source: str) -> Sequence[str]:
    """Texts of a Python file that are patterns with a group, or name what stands before an answer."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return ()
    texts = [one.value for one in ast.walk(tree) if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    patterns = [text for text in texts if re.search(r"\(.*[.\\\[].*\)", text) and len(text) < 300]
    heads = [re.escape(text) + r"\s*(.*)" for text in texts if re.fullmatch(r"[^\n(]{2,40}[:=]\s*", text)]
    return [*dict.fromkeys((*patterns, *heads))][:_MOST_OF_SOURCE]
