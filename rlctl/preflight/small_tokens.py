"""What a tokenizer makes of prompts, answers, stop texts and patterns, where its file is small enough to be loaded in
passing. Of a larger one `--probe` says the same."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlctl.preflight.data_rows import Looked
from rlctl.preflight.data_sense import all_text
from specs.errors import Problem
from specs.schema.rewards import ExactMatch, Regex, compares_answer
from specs.schema.row_values import gold_answer
from specs.schema.spec import Spec
from specs.text import show
from workers.grading.pattern_example import example

_MOST_BYTES = 1 << 20
_ROWS = 64


def token_warnings(spec: Spec, folder: Path, looked: Mapping[str, Looked]) -> Iterator[Problem]:
    """Warnings about what does not fit, or cannot be written. `folder`: the model's."""
    tokenizer = _loaded(folder / "tokenizer.json")
    if tokenizer is None:
        return

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False).ids)

    def back(text: str) -> str:
        return str(tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids)).strip()

    yield from _stops(spec, count, back)
    yield from _patterns(spec, count)
    for key, found in looked.items():
        rows = found.rows[:_ROWS]
        if rows and not found.fault:
            yield from _prompts(spec, rows, count)
            if compares_answer(spec.reward.terms):
                golds = [gold_answer(row[spec.data.answer_column]) for row in rows]
                yield from _answers(spec, key, golds, count, back)


def _loaded(file: Path) -> Any | None:
    if not file.is_file() or file.stat().st_size > _MOST_BYTES:
        return None
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(file))
    except Exception:  # of a file that is broken, which is said elsewhere
        return None


def _stops(spec: Spec, count: Callable[[str], int], back: Callable[[str], str]) -> Iterator[Problem]:
    for text in spec.rollout.stop:
        if count(text) != 1 or back(text) not in (text.strip(), ""):
            message = f"{show(text)} is {count(text)} tokens of the model's tokenizer, not one"
            yield Problem("rollout.stop", message, "rollout.stop takes texts of exactly one token", show(text))


def _patterns(spec: Spec, count: Callable[[str], int]) -> Iterator[Problem]:
    most = spec.data.max_response_tokens
    for index, term in enumerate(spec.reward.terms):
        if isinstance(term, Regex) and term.weight > 0 and (text := example(term.pattern, "7")) and count(text) > most:
            message = f"what it is found in has about {count(text)} tokens, and a completion at most {most}"
            hint = "raise data.max_response_tokens, or ask for less"
            yield Problem(f"reward.terms.{index}.pattern", message, hint, show(term.pattern))


def _prompts(spec: Spec, rows: Sequence[Mapping[str, Any]], count: Callable[[str], int]) -> Iterator[Problem]:
    most = spec.data.max_prompt_tokens
    counts = [count(all_text(row, spec)) for row in rows]
    if 2 * sum(tokens > most for tokens in counts) >= len(counts):
        long = sum(tokens > most for tokens in counts)
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
