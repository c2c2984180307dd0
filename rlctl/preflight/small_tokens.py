"""What a tokenizer makes of prompts, answers, stop texts and patterns, where its file is small enough to be loaded in
passing. Of a larger one single tokens are looked for in the file; `--probe` says the rest."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlctl.models.tokenizer_files import TokenTable, token_table
from rlctl.preflight.data_rows import Looked
from rlctl.preflight.data_sense import all_text, source_of
from rlctl.preflight.rendered_rows import Refused, messages_of, rendering
from specs.errors import Problem
from specs.schema.rewards import ExactMatch, Regex, compares_answer
from specs.schema.row_values import gold_answer
from specs.schema.spec import Spec
from specs.text import show
from workers.grading.pattern_example import example

_MOST_BYTES = 1 << 20
_ROWS = 64
_REFUSED_S = 0.1  # for rows behind one another, where one that is too long is refused
_ONE_TOKEN = "rollout.stop takes texts of exactly one token"
_AROUND = 4  # tokens that a tokenizer puts around a text


def token_warnings(spec: Spec, folder: Path, template: str, looked: Mapping[str, Looked]) -> Iterator[Problem]:
    """Warnings about what does not fit, or cannot be written. `folder`: the model's; `template`: its chat template, ""
    where there is none."""
    tokenizer = small_tokenizer(folder)
    if tokenizer is None:
        if (table := token_table(folder)) is not None:
            yield from _by_table(spec, table, looked, plain=not template or spec.data.chat == "never")
        return

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False).ids)

    def back(text: str) -> str:
        return str(tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids)).strip()

    yield from _stops(spec, count, back)
    yield from _patterns(spec, count, back)
    chat = bool(template) and spec.data.chat != "never"
    written = _written(spec, folder, template) if chat else lambda row: all_text(row, spec)

    def ids(row: Mapping[str, Any]) -> list[int]:
        return list(tokenizer.encode(written(row), add_special_tokens=not chat).ids)

    for key, found in looked.items():
        rows = found.rows[:_ROWS]
        if rows and not found.fault:
            yield from _prompts(spec, rows, ids)
            if spec.data.overlong == "refuse":
                yield from _refused(spec, found.rows, written, ids)
            if not chat:
                yield from _begun_twice(spec, key, rows, ids, tokenizer)
            if compares_answer(spec.reward.terms):
                golds = [gold_answer(row[spec.data.answer_column]) for row in rows]
                yield from _answers(spec, key, golds, count, back)


def small_tokenizer(folder: Path) -> Any | None:
    """The tokenizer of a model's folder, as the library `tokenizers` has it; None of one that is large or broken."""
    file = folder / "tokenizer.json"
    if not file.is_file() or file.stat().st_size > _MOST_BYTES:
        return None
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(file))
    except Exception:  # of a file that is broken, which is said elsewhere
        return None


def _by_table(spec: Spec, table: TokenTable, looked: Mapping[str, Looked], *, plain: bool) -> Iterator[Problem]:
    """What can be told of a large tokenizer without building it. `plain`: prompts are no conversations."""
    special = table.special

    def back(text: str) -> str:
        for one in special:
            text = text.replace(one, "")
        return text

    for text in spec.rollout.stop:
        if not table.says(text) and "Lowercase" not in repr(table.head.get("normalizer")):
            yield Problem("rollout.stop", f"{show(text)} is no token of the model's tokenizer", _ONE_TOKEN, show(text))
    yield from _patterns(spec, lambda text: 0, back)
    for key, found in looked.items():
        prompts = [all_text(row, spec) for row in found.rows[:_ROWS]]
        if plain and prompts and (begin := table.begins_with) and all(text.startswith(begin) for text in prompts):
            yield _twice(spec, key, begin)


def _stops(spec: Spec, count: Callable[[str], int], back: Callable[[str], str]) -> Iterator[Problem]:
    for text in spec.rollout.stop:
        if count(text) != 1 or back(text) not in (text.strip(), ""):
            message = f"{show(text)} is {count(text)} tokens of the model's tokenizer, not one"
            yield Problem("rollout.stop", message, _ONE_TOKEN, show(text))


def _written(spec: Spec, folder: Path, template: str) -> Callable[[Mapping[str, Any]], str]:
    """How a row is rendered; as it is where the template cannot be, which is said elsewhere."""
    try:
        render = rendering(template, folder)
    except Exception:  # of a template that is no Jinja
        return lambda row: all_text(row, spec)

    def written(row: Mapping[str, Any]) -> str:
        try:
            return render(messages_of(row, spec))
        except Refused:
            return all_text(row, spec)

    return written


def _patterns(spec: Spec, count: Callable[[str], int], back: Callable[[str], str]) -> Iterator[Problem]:
    most = spec.data.max_response_tokens
    for index, term in enumerate(spec.reward.terms):
        if isinstance(term, Regex) and term.weight > 0 and (text := example(term.pattern, "7")) and count(text) > most:
            message = f"what it is found in has about {count(text)} tokens, and a completion at most {most}"
            hint = "raise data.max_response_tokens, or ask for less"
            yield Problem(f"reward.terms.{index}.pattern", message, hint, show(term.pattern))
        elif isinstance(term, Regex) and term.weight > 0 and (lost := _lost(term.pattern, back)):
            message = f"the tokenizer cannot write what it is found in: {show(lost[0], 40)} becomes {show(lost[1], 40)}"
            hint = "ask for what the model's tokens can say; special tokens are not in what is graded"
            yield Problem(f"reward.terms.{index}.pattern", message, hint, show(term.pattern))


def _lost(pattern: str, back: Callable[[str], str]) -> tuple[str, str] | None:
    """A text that the pattern is found in, and what the tokenizer makes of it, in which it is not; None where one of
    several is found again."""
    texts = [text for inside in ("7", "a", "so it is", "") if (text := example(pattern, inside)) is not None]
    if not texts or any(re.search(pattern, back(text), re.DOTALL) for text in texts):
        return None
    return texts[0], back(texts[0])


def _refused(
    spec: Spec,
    rows: Sequence[Mapping[str, Any]],
    written: Callable[[Mapping[str, Any]], str],
    ids: Callable[[Mapping[str, Any]], list[int]],
) -> Iterator[Problem]:
    """The first prompt that is too long, where such a one ends the start."""
    most, until = spec.data.max_prompt_tokens, time.monotonic() + _REFUSED_S
    for number, row in enumerate(rows, 1):
        if time.monotonic() > until:
            return
        if len(written(row).encode()) > most - _AROUND and (tokens := len(ids(row))) > most:
            message = f"row {number} has {tokens} tokens, and data.overlong refuses longer prompts"
            yield Problem("data.max_prompt_tokens", message, 'raise it, or set data.overlong = "drop"', str(most))
            return


def _begun_twice(
    spec: Spec,
    key: str,
    rows: Sequence[Mapping[str, Any]],
    ids: Callable[[Mapping[str, Any]], list[int]],
    tokenizer: Any,
) -> Iterator[Problem]:
    """Prompts that begin with the token that the tokenizer puts before plain text."""
    begun = [ids(row)[:2] for row in rows]
    if all(len(two) == 2 and two[0] == two[1] for two in begun) and len({tuple(two) for two in begun}) == 1:
        token = tokenizer.id_to_token(begun[0][0])
        if not tokenizer.decode([begun[0][0]]):  # a special token, and no word that stands there twice
            yield _twice(spec, key, token)


def _twice(spec: Spec, key: str, token: str) -> Problem:
    message = f"prompts begin with {show(token)}, and the tokenizer puts another before them"
    return Problem(key, message, "leave it out of the prompts", source_of(key, spec))


def _prompts(
    spec: Spec, rows: Sequence[Mapping[str, Any]], ids: Callable[[Mapping[str, Any]], list[int]]
) -> Iterator[Problem]:
    most = spec.data.max_prompt_tokens
    counts = [len(ids(row)) for row in rows]
    long = sum(tokens > most for tokens in counts)
    if 2 * long >= len(counts):
        message = f"{long} of the first {len(rows)} prompts are longer, and dropped: up to {max(counts)} tokens"
        yield Problem("data.max_prompt_tokens", message, "raise it, or shorten the prompts", str(most))


def _answers(
    spec: Spec, key: str, golds: Sequence[str], count: Callable[[str], int], back: Callable[[str], str]
) -> Iterator[Problem]:
    exact = [term for term in spec.reward.terms if isinstance(term, ExactMatch)]
    if not exact:
        return
    most, fewest = spec.data.max_response_tokens, min(map(count, golds))
    whole = not any(term.partial for term in exact)
    if whole and fewest > most:
        message = f"no completion can be as long as any of the first {len(golds)} answers: the shortest has {fewest}"
        yield Problem("data.max_response_tokens", f"{message} tokens", "raise it", str(most))
        return
    written = [(gold, back(gold)) for gold in golds]
    if any(term.ignore_case for term in exact):
        written = [(gold.casefold(), text.casefold()) for gold, text in written]
    squeezed = [(re.sub(r"\s+", "", gold), re.sub(r"\s+", "", text)) for gold, text in written]
    if all(gold != text if whole else not set(gold) & set(text) for gold, text in squeezed):
        message = f"the tokenizer can write none of the first {len(golds)} answers: {show(golds[0])} becomes "
        hint = "use a model whose tokenizer knows the characters, or ignore_case"
        yield Problem(key, message + show(written[0][1]), hint, show(spec.data.train))
