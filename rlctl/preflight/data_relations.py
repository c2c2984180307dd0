"""What rows tell together: prompts that stand there again and again or were cut off, answers of the row beside, columns
of several types, characters that nobody sees, and texts that are longer than the tokens that are left for them."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from rlctl.preflight.data_rows import Looked
from rlctl.preflight.data_sense import all_text, source_of
from specs.errors import Problem
from specs.schema.rewards import ExactMatch, MathVerify, Regex, compares_answer
from specs.schema.row_values import gold_answer
from specs.schema.spec import Spec
from specs.text import show
from workers.grading.pattern_example import example

_FEW = 20  # rows below which nothing is concluded from what they have in common
_MOST = 2000  # rows that are looked at
_CUT_SHARE, _CUT_LENGTH = 0.2, 100  # of prompts that are all equally long, and that long
_SHIFTED, _NOT_OWN = 0.8, 0.2  # shares of answers that belong to the row beside, and to their own
_ROLES = {
    "system",
    "developer",
    "user",
    "assistant",
    "tool",
    "function",
    "ipython",
    "observation",
    "context",
    "document",
}
_CHARACTERS_A_TOKEN = 16  # more than text has on average in any vocabulary
_THINK = re.compile(
    r"step[ -]by[ -]step|<think>|show (?:your|all|the) (?:work|steps)|explain your|let's think"
    r"|think (?:carefully|first|about)",
    re.IGNORECASE,
)
_WORDS = re.compile(r"[^\W\d_]{4,}(?:[ ,.'-]+[^\W\d_]+)*")
_CHOICE = re.compile(r"^\s*\(?([A-Za-z]|\d{1,2})[).:]\s+(.*)$", re.MULTILINE)
_LETTER = re.compile(r"\b(?:letter|[Oo]nly (?:the )?(?:option|choice))\b")
_SAME_MARKS = "write the answers as the choices are marked"
_THOUGHT_TOKENS, _SHORT = 32, 40  # tokens, characters
_SUM = re.compile(r"(?<![\d.])(-?\d{1,9})\s*([+\-*×x])\s*(-?\d{1,9})(?![\d.])")
_ENDS = (".", "?", "!", ":", '"', "'", ")", "]", "}", ">", "`", "…", "。", "?", "=", "*")
_COMPUTED: Mapping[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    **dict.fromkeys(("*", "×", "x"), lambda a, b: a * b),
}

Said = tuple[str, str, str]  # key, or "" for the source's own; what is wrong, and a hint
Rows = Sequence[Mapping[str, Any]]


def relation_warnings(spec: Spec, looked: Mapping[str, Looked], template: str) -> Iterator[Problem]:
    """Warnings about sources whose rows can be used. `template`: the model's chat template, as far as it is known."""
    for key, found in looked.items():
        rows = found.rows[:_MOST]
        if not rows or found.fault:
            continue
        prompts = [all_text(row, spec) for row in rows]
        seen = [*_roles(rows, spec, template), *_too_long(prompts, rows, spec), *_stopped(rows, spec)]
        seen += [*_only_at_once(prompts, spec), *_left_in_braces(rows, spec)]
        if len(rows) >= _FEW:
            seen += [*_again(prompts, rows, spec), *_cut_off(prompts), *_types(rows, spec), *_unseen(rows, spec)]
            seen += [*_shifted(prompts, rows, spec), *_other_column(prompts, rows, spec)]
            seen += _unseen_choices(prompts, rows, spec)
        for other, message, hint in seen:
            yield Problem(other or key, message, hint, _value(other, spec) if other else source_of(key, spec))


def _value(key: str, spec: Spec) -> str:
    section, _, name = key.partition(".")
    return show(getattr(getattr(spec, section), name))


def _golds(rows: Rows, spec: Spec) -> list[str]:
    """The answers that a completion is compared with; none where nothing compares."""
    return [gold_answer(row[spec.data.answer_column]) for row in rows] if compares_answer(spec.reward.terms) else []


# ── prompts ───────────────────────────────────────────────────────────────────────────────────────


def _again(prompts: Sequence[str], rows: Rows, spec: Spec) -> Iterator[Said]:
    """Rows that are there several times: an epoch of them is several, and rows held out are trained on."""
    counted = Counter(zip(prompts, _golds(rows, spec) or prompts, strict=True))
    if 2 * len(counted) <= len(prompts):
        held = ", and rows that are held out are trained on" if any(not one.data for one in spec.evaluations) else ""
        message = f"its first {len(prompts)} rows hold {len(counted)} different ones: each stands there again{held}"
        yield "", message, "leave each in once: the run itself begins anew when all were drawn"


def _cut_off(prompts: Sequence[str]) -> Iterator[Said]:
    """Prompts that all end at one length, in the middle of what they say."""
    lengths = Counter(map(len, prompts))
    longest = max(lengths)
    at_end = [prompt for prompt in prompts if len(prompt) == longest]
    torn = [prompt for prompt in at_end if not prompt.rstrip().endswith(_ENDS)]
    if longest >= _CUT_LENGTH and len(torn) >= max(5, _CUT_SHARE * len(prompts)) and 2 * len(torn) > len(at_end):
        message = f"{len(at_end)} of its first {len(prompts)} prompts have {longest} characters, and none has more"
        yield "", f"{message}: they were cut off, such as …{show(torn[0][-20:])}", "write them whole"


def _left_in_braces(rows: Rows, spec: Spec) -> Iterator[Said]:
    """What a template picks out of a column, or how it would write it, as Python's format does and templates here do
    not."""
    for text, column in re.findall(r"(\{(\w+)[\[.:!][^{}]*\})", spec.data.template):
        if column in rows[0]:
            message = f"has {text}, which stays as it is: braces hold the name of a column and nothing else"
            yield "data.template", message, "put what is meant into a column of its own"
            return


def _unseen_choices(prompts: Sequence[str], rows: Rows, spec: Spec) -> Iterator[Said]:
    """Answers that are marks of choices, which stand in a column and in no prompt."""
    golds = _golds(rows, spec)
    if not golds or not all(re.fullmatch(r"\(?(?:[A-Ja-j]|\d)\)?", gold) for gold in golds):
        return
    for column in rows[0]:
        lists = [_listed(row.get(column)) for row in rows]
        if all(len(found) > 1 for found in lists) and not any(
            text in prompt for prompt, found in zip(prompts, lists, strict=True) for text in found
        ):
            message = f"answers are marks of choices, such as {show(golds[0])}, and no prompt shows those of {column!r}"
            yield "", message, "write the choices into the prompt"
            return


def _listed(value: object) -> list[str]:
    """Texts of a list, or of the longest list in an object; none of anything else."""
    if isinstance(value, Mapping):
        return max(map(_listed, value.values()), key=lambda texts: sum(map(len, texts)), default=[])
    texts = value if isinstance(value, list) and all(isinstance(one, str) for one in value) else []
    return [text for text in texts if len(text) > 1]


def _roles(rows: Rows, spec: Spec, template: str) -> Iterator[Said]:
    """Messages of roles that no template knows by that name."""
    column = spec.data.prompt_column
    if spec.data.template:
        return
    lists = [row[column] for row in rows if isinstance(row[column], list)]
    roles = dict.fromkeys(str(message["role"]) for messages in lists for message in messages)
    if spec.data.system and lists and all(messages[0]["role"] == "system" for messages in lists):
        message = "does nothing: the rows begin with a system message of their own"
        yield "data.system", message, "remove it, or take the messages out of the rows"
    odd = [role for role in roles if role not in _ROLES and not re.search(rf"\b{re.escape(role)}\b", template)]
    if odd:
        message = f"messages are of the role {show(odd[0])}, which models are not trained on"
        near = {"human": "user", "User": "user", "gpt": "assistant", "bot": "assistant"}.get(odd[0], "user")
        yield "", message, f'the roles are system, user and assistant: is it "{near}"?'


# ── answers ───────────────────────────────────────────────────────────────────────────────────────


def _types(rows: Rows, spec: Spec) -> Iterator[Said]:
    """An answer that is text in one row and a number in another."""
    column = spec.data.answer_column
    values = [row[column] for row in rows if column in row]
    kinds = Counter(
        "text" if isinstance(one, str) else "a number" for one in values if isinstance(one, str | int | float)
    )
    if len(kinds) == 2 and len(values) == len(rows):
        message = f"column {column!r} is text in {kinds['text']} of its first {len(rows)} rows, and else a number"
        yield "", message, "write all answers in one way: 7 is not '7' to a function that compares them"


def _other_column(prompts: Sequence[str], rows: Rows, spec: Spec) -> Iterator[Said]:
    """Answers that are the numbers of the rows, questions, words where math_verify reads values, or a line where the
    prompt asks for more."""
    golds, column, terms = _golds(rows, spec), spec.data.answer_column, spec.reward.terms
    if not golds:
        return
    counts = any(golds == [str(number) for number in range(first, first + len(golds))] for first in (0, 1))
    if (
        counts
        and not _fits_its_own(prompts, golds)
        and 2 * len(set(prompts)) > len(prompts)
        and not all(gold in prompt for gold, prompt in zip(golds, prompts, strict=True))
    ):
        yield (
            "",
            f"column {column!r} counts the rows: {', '.join(golds[:4])}, …",
            "name the column that holds the answer",
        )
    choices = [_CHOICE.findall(prompt) for prompt in prompts]
    if all(len(found) > 1 for found in choices):
        none = [
            gold
            for gold, found in zip(golds, choices, strict=True)
            if not any(gold.casefold() in (mark.casefold(), text.strip().casefold()) for mark, text in found)
        ]
        if len(none) >= 0.9 * len(golds) and all(re.fullmatch(r"\d+|[A-Za-z]", gold) for gold in none):
            marks = ", ".join(mark for mark, _ in choices[0])
            yield "", f"column {column!r} holds {show(none[0])}, and the prompt's choices are {marks}", _SAME_MARKS
        letters = [one for one in prompts if _LETTER.search(f"{spec.data.system}\n{one}")]
        marked = [
            any(gold.strip("(). ").casefold() == mark.casefold() for mark, _ in found)
            for gold, found in zip(golds, choices, strict=True)
        ]
        if len(letters) == len(prompts) and not none and not any(marked):
            message = f"column {column!r} holds a choice's text, such as {show(golds[0], 40)}, and prompts ask for"
            yield "", f"{message} its letter", _SAME_MARKS
    asks = [sum(text.rstrip().endswith(("?", "？")) for text in texts) for texts in (golds, prompts)]
    if asks[0] >= 0.8 * len(golds) and asks[1] <= 0.2 * len(prompts):
        message = f"column {column!r} holds questions, such as {show(golds[0], 40)}, and the prompts none"
        yield "", message, "are data.prompt_column and data.answer_column the wrong way round?"
    words = [gold for gold in golds if _WORDS.fullmatch(gold)]
    if any(isinstance(term, MathVerify) for term in terms) and len(words) >= 0.8 * len(golds):
        message = f"column {column!r} holds words, such as {show(words[0], 40)}, in which math_verify finds no value"
        yield "", message, "grade words with exact_match, or with a function"
    exact = [term for term in terms if isinstance(term, ExactMatch) and not term.partial]
    alone = len(exact) == sum(term.weight > 0 for term in terms) and all(len(gold) < _SHORT for gold in golds)
    if alone and ask_to_think(prompts, spec):
        message = "prompts ask to think first, and exact_match compares all that the completion says with the answer"
        yield "", message, "grade with math_verify, or with a function that reads the final answer"


def ask_to_think(prompts: Sequence[str], spec: Spec) -> bool:
    """Whether all prompts, or the system prompt above them, ask for thoughts before the answer."""
    return all(_THINK.search(f"{spec.data.system}\n{prompt}") for prompt in prompts)


def _only_at_once(prompts: Sequence[str], spec: Spec) -> Iterator[Said]:
    """Prompts that ask to think first, and a pattern that nothing may stand before."""
    if not ask_to_think(prompts, spec):
        return
    for index, term in enumerate(spec.reward.terms):
        text = example(term.pattern, "7") if isinstance(term, Regex) and term.weight > 0 else None
        if not text or not isinstance(term, Regex) or "<" in text:
            continue
        if not re.search(term.pattern, f"So it is.\n{text}", re.DOTALL):
            message = f"prompts ask to think first, and reward.terms.{index}.pattern lets nothing stand before it"
            yield "", message, "leave the ^ out, or ask for the answer alone"


def _unseen(rows: Rows, spec: Spec) -> Iterator[Said]:
    """Answers with characters that nobody sees and no completion has."""
    if not any(isinstance(term, ExactMatch) for term in spec.reward.terms):
        return
    golds = _golds(rows, spec)
    held = [(gold, char) for gold in golds for char in gold if unicodedata.category(char) == "Cf" or char == "\u00a0"]
    held = [(gold, char) for gold, char in held if char != "\u200d"]  # joins the parts of an emoji
    if len(dict(held)) * 10 > len(set(golds)):
        name = unicodedata.name(held[0][1], f"U+{ord(held[0][1]):04X}")
        message = f"{len(dict(held))} answers hold characters that nobody sees, such as {name}"
        yield "", message, "take them out: a completion without them is not equal"


def _shifted(prompts: Sequence[str], rows: Rows, spec: Spec) -> Iterator[Said]:
    """Answers that fit the prompt of the row before or behind, and not their own."""
    golds = _golds(rows, spec)
    if len(set(golds)) < 4 or _fits_its_own(prompts, golds):
        return
    for fits in (_computes, _says, _rearranges):
        own = _share(fits, zip(prompts, golds, strict=True))
        if own is None or own > _NOT_OWN:
            continue
        beside = {
            "before": _share(fits, ((one, gold) for (one, _), (_, gold) in pairwise(zip(prompts, golds, strict=True)))),
            "behind": _share(fits, ((one, gold) for (_, gold), (one, _) in pairwise(zip(prompts, golds, strict=True)))),
        }
        for where, share in beside.items():
            if share is not None and share >= _SHIFTED:
                message = f"{share:.0%} of its answers fit the prompt of the row {where}, and {own:.0%} their own"
                yield "", message, "the answers are one row off: join prompts and answers anew"
                return


def _fits_its_own(prompts: Sequence[str], golds: Sequence[str]) -> bool:
    shares = (_share(fits, zip(prompts, golds, strict=True)) for fits in (_computes, _says, _rearranges))
    return any(share is not None and share >= _SHIFTED for share in shares)


def _share(fits: Callable[[str, str], bool | None], pairs: Iterator[tuple[str, str]]) -> float | None:
    """Share of the pairs that fit; None where most do not tell."""
    told = [fits(prompt, gold) for prompt, gold in pairs]
    known = [one for one in told if one is not None]
    return sum(known) / len(known) if known and 2 * len(known) > len(told) else None


def _computes(prompt: str, gold: str) -> bool | None:
    found = _SUM.findall(prompt)
    if len(found) != 1 or not re.fullmatch(r"-?[\d,]{1,20}", gold):
        return None
    one, sign, other = found[0]
    return _COMPUTED[sign](int(one), int(other)) == int(gold.replace(",", "") or 0)


def _says(prompt: str, gold: str) -> bool | None:
    if not re.search(r"[^\W\d]{2}", gold):  # of a number it is no sign: "1 + 12?" says 12 and not 13
        return None
    return re.search(rf"(?<!\w){re.escape(gold)}(?!\w)", prompt, re.IGNORECASE) is not None


def _rearranges(prompt: str, gold: str) -> bool | None:
    """Whether the answer is a word of the prompt with its letters in another order."""
    if len(gold) < 3 or " " in gold:
        return None
    letters = sorted(gold)
    return any(sorted(word) == letters for word in re.findall(r"\w+", prompt))


# ── lengths ───────────────────────────────────────────────────────────────────────────────────────


def _too_long(prompts: Sequence[str], rows: Rows, spec: Spec) -> Iterator[Said]:
    """Texts of so many characters that they have more tokens than are allowed, in any vocabulary."""
    data = spec.data
    long = [len(prompt) for prompt in prompts if _least_tokens(prompt) > data.max_prompt_tokens]
    if 2 * len(long) >= len(prompts):
        message = (
            f"{len(long)} of the first {len(prompts)} prompts are longer, and dropped: up to {max(long):,} characters"
        )
        yield "data.max_prompt_tokens", message, "raise it, or shorten the prompts"
    if data.max_response_tokens < _THOUGHT_TOKENS and ask_to_think(prompts, spec):
        message = "prompts ask to think first, and so few tokens are left for that and the answer"
        yield "data.max_response_tokens", message, "some hundred are usual"
    golds = _golds(rows, spec)
    too_long = [gold for gold in golds if _least_tokens(gold) > data.max_response_tokens]
    if golds and 2 * len(too_long) >= len(golds) and any(isinstance(term, ExactMatch) for term in spec.reward.terms):
        message = f"{len(too_long)} of the first {len(golds)} answers are longer: no completion can be equal to one"
        yield "data.max_response_tokens", message, "raise it"


def _least_tokens(text: str) -> float:
    """Fewer than any tokenizer makes of a text."""
    return len("".join(text.split())) / _CHARACTERS_A_TOKEN


def _stopped(rows: Rows, spec: Spec) -> Iterator[Said]:
    """A text that ends a completion, in the middle of what it is to say."""
    golds = _golds(rows, spec)
    for text in spec.rollout.stop:
        inside = [gold for gold in golds if text in gold[: -len(text)]]
        if golds and 2 * len(inside) > len(golds) and any(isinstance(term, ExactMatch) for term in spec.reward.terms):
            message = f"{show(text)} ends a completion, and stands in {len(inside)} of the first {len(golds)} answers"
            yield "rollout.stop", message, "leave it out: no completion can say such an answer"
