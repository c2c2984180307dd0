"""Check that the rows' own answers can be right: written by the tokenizer, short enough, and read by math_verify."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from backends.hf.tokenizer import TextCodec
from specs.schema.rewards import ExactMatch, MathVerify, compares_answer
from specs.schema.row_values import gold_answer
from specs.schema.sections import is_hub_data
from specs.text import show
from specs.wire.finding import Finding
from specs.wire.role_config import DataConfig, RewardConfig
from workers.data.row_source import read_rows
from workers.grading.terms import GradeRequest, Setting, make_term

_ROWS = 64  # whose answers are looked at


def answer_findings(config: RewardConfig, data: DataConfig, codec: TextCodec) -> Iterator[Finding]:
    """Yield what no completion could be right about, by the terms that compare with the rows' answers."""
    assert data.data is not None, "a reward grades completions of prompts"
    if is_hub_data(data.data.train) or not compares_answer(config.reward.terms):
        return
    rows = read_rows(data.data.train, split="", base=Path(config.spec_dir), max_rows=_ROWS)
    golds = [gold_answer(row.values[config.answer_column]) for row in rows if config.answer_column in row.values]
    if not golds:
        return  # the data role says what is wrong with the rows
    if any(isinstance(term, ExactMatch) and not term.partial for term in config.reward.terms):
        yield from _never_equal(golds, config, codec)
    for number, term in enumerate(config.reward.terms):
        if isinstance(term, MathVerify) and (without := _without_value(term, golds, config)):
            none = len(without) == len(golds)
            how_many = f"{'any' if none else len(without)} of the first {len(golds)} answers"
            hint = "use exact_match for answers that are words; completions of such rows are not graded"
            key, value = f"reward.terms.{number}", show(without[0])
            message = f"math_verify finds no value in {how_many}"
            yield Finding(key=key, message=message, hint=hint, value=value, refuses=none)


def _never_equal(golds: Sequence[str], config: RewardConfig, codec: TextCodec) -> Iterator[Finding]:
    """Yield why no completion of the run can be equal to an answer."""
    tokens, most = codec.encode(golds, rendered=True), config.max_response_tokens
    count, back = f"the first {len(golds)} answers", codec.decode(tokens)
    if all(len(ids) > most for ids in tokens):
        message = f"no completion can be as long as any of {count}: the shortest has {min(map(len, tokens))} tokens"
        yield Finding(key="data.max_response_tokens", message=message, hint="raise it")
    elif all(gold != written.strip() for gold, written in zip(golds, back, strict=True)):
        message = f"the tokenizer can write none of {count}: {show(golds[0])} becomes {show(back[0])}"
        yield Finding(key="data.train", message=message, hint="use a model whose tokenizer knows the characters")


def _without_value(term: MathVerify, golds: Sequence[str], config: RewardConfig) -> list[str]:
    """Return the answers that the term cannot be computed for."""
    setting = Setting(config.answer_column, config.max_response_tokens, config.spec_dir)
    grade, without = make_term(term.model_dump(), setting), []
    for gold in golds:
        try:
            grade(GradeRequest(0, "", {config.answer_column: gold}, "", 1))
        except ValueError:
            without.append(gold)
    return without
