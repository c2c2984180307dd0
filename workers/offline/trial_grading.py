"""Terms of a reward, tried on the first rows of the data by the processes that grade in a run. The completion is each
row's own answer; a function is called with an empty one too."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from backends.hf.tokenizer import TextCodec
from specs.schema.rewards import MAX_SCORE, ExactMatch, Function, MathVerify, Regex, RewardTerm, compares_answer
from specs.schema.row_values import gold_answer
from specs.text import show
from specs.wire.meta_request import Finding
from specs.wire.role_config import DataConfig, RewardConfig
from workers.data.prompts import PromptTable
from workers.grading.pool import Grade, GraderPool, Request
from workers.grading.reward_failures import is_of_code, last_line
from workers.grading.terms import Setting
from workers.grading.trial_completions import likely_completions
from workers.offline.first_rows import first_tables

_ROWS = 64  # whose answers are looked at
_TIMEOUT_S = 5.0
_TAG = re.compile(r"<[a-z_]+>\s*$")


def grading_findings(config: RewardConfig, data: DataConfig, codec: TextCodec) -> Iterator[Finding]:
    """What no completion could be right about, and calls of functions that give no score."""
    found = next(iter(first_tables(data, codec)), None)
    if found is None or isinstance(found, Finding) or not len(found[1]):
        return  # the data is on a hub, or the data role says what is wrong with it
    table = found[1]
    if compares_answer(config.reward.terms):
        golds = [gold_answer(row[config.answer_column]) for row in table.rows[:_ROWS]]
        if any(isinstance(term, ExactMatch) and not term.partial for term in config.reward.terms):
            yield from _never_equal(golds, config, codec)
    for number, term in enumerate(config.reward.terms):
        if isinstance(term, Regex | Function):
            yield from _stripped(number, term, table, config, codec)
        if isinstance(term, MathVerify):
            yield from _no_value(number, _graded(term, table, golds, config), golds)
        elif isinstance(term, Function):
            answer = table.rows[0].get(config.answer_column)
            # Two calls: each may cost something.
            completions = ["" if answer is None else gold_answer(answer), ""]
            grades = [_in_range(grade) for grade in _graded(term, table, completions, config)]
            yield from _no_score(number, term, grades, table)
            yield from _of_another_type(number, term, grades, table, config)
            if answer is not None and sum(other.weight > 0 for other in config.reward.terms) == 1:
                yield from _nothing_is_best(number, term, grades)


def _never_equal(golds: Sequence[str], config: RewardConfig, codec: TextCodec) -> Iterator[Finding]:
    """Answers that no completion of the run can be equal to."""
    tokens, most = codec.encode(golds, rendered=True), config.max_response_tokens
    count = f"the first {len(golds)} answers"
    back = codec.decode(tokens)
    if all(len(ids) > most for ids in tokens):
        message = f"no completion can be as long as any of {count}: the shortest has {min(map(len, tokens))} tokens"
        yield Finding(key="data.max_response_tokens", message=message, hint="raise it", value=str(most))
    elif all(gold != written.strip() for gold, written in zip(golds, back, strict=True)):
        message = f"the tokenizer can write none of {count}: {show(golds[0])} becomes {show(back[0])}"
        yield Finding(key="data.train", message=message, hint="use a model whose tokenizer knows the characters")


def _stripped(
    number: int, term: Regex | Function, table: PromptTable, config: RewardConfig, codec: TextCodec
) -> Iterator[Finding]:
    """A term that rewards what no completion holds: special tokens, which its text is read without, or the tag that
    the prompt ends with."""
    answer = table.rows[0].get(config.answer_column)
    likely = likely_completions(gold_answer(answer) if answer is not None else "7")
    written = [one.text for one in likely if one.right]
    special = [str(token) for token in codec.tokenizer.added_tokens_decoder.values() if token.special]
    lost = [token for token in special if any(token in text for text in written)]
    begun = _TAG.search(table.prompts[0])
    if term.weight <= 0 or not (lost or begun):
        return
    read = codec.decode(codec.encode(written, rendered=True))
    if begun:
        read = [text.removeprefix(begun[0].strip()).lstrip() for text in read]
    first = replace(table, rows=table.rows[:1], prompts=table.prompts[:1])
    wrong = next(one.text for one in likely if not one.right)
    grades = _graded(term, first, [wrong, *written, *read], config)
    if any(grade.cause for grade in grades):
        return
    nothing, *values = (grade.values[0] for grade in grades)
    if max(values[: len(written)]) <= nothing or max(values[len(written) :]) > nothing:
        return
    what = "pattern" if isinstance(term, Regex) else "path"
    if lost:
        message = f"rewards {', '.join(lost)}, special tokens of this tokenizer, and completions are read without them"
        hint = "mark the parts with text that is no special token, or make the tokens plain ones"
    else:
        assert begun is not None
        message = f"rewards {begun[0].strip()}, with which the prompt ends already: a completion goes on behind it"
        hint = "leave it out of what is asked for"
    key, value = f"reward.terms.{number}.{what}", show(getattr(term, what))
    yield Finding(key=key, message=message, hint=hint, value=value, refuses=False)


def _graded(term: RewardTerm, table: PromptTable, completions: Sequence[str], config: RewardConfig) -> list[Grade]:
    """The grades that a term alone gives these completions, one for each of the first rows; the last row is given
    again where there are fewer."""
    last = len(table) - 1
    requests = [
        Request(number, table.prompts[min(number, last)], table.rows[min(number, last)], completion, len(completion))
        for number, completion in enumerate(completions)
    ]
    setting = Setting(config.answer_column, config.max_response_tokens, config.spec_dir)
    timeout_s = min(config.reward.timeout_s, _TIMEOUT_S)
    with tempfile.TemporaryDirectory(prefix="rlctl-probe-") as folder:
        log = Path(folder, "output.log")
        with GraderPool([term.model_dump()], setting, workers=1, timeout_s=timeout_s, log_path=log) as pool:
            pool.wait_ready()
            return pool.grade(requests)


def _no_value(number: int, grades: Sequence[Grade], golds: Sequence[str]) -> Iterator[Finding]:
    without = [gold for gold, grade in zip(golds, grades, strict=True) if grade.cause]
    if not without:
        return
    all_of_them = len(without) == len(golds)
    how_many = f"any of the first {len(golds)}" if all_of_them else f"{len(without)} of the first {len(golds)}"
    message = f"math_verify finds no value in {how_many} answers, such as {show(without[0])}"
    hint = "use exact_match for answers that are words" if all_of_them else "their completions are not graded"
    yield Finding(key=f"reward.terms.{number}", message=message, hint=hint, refuses=all_of_them)


def _nothing_is_best(number: int, term: Function, grades: Sequence[Grade]) -> Iterator[Finding]:
    """The only term that rewards anything, where it gives an empty completion what it gives a right one, or more."""
    if any(grade.cause for grade in grades) or term.weight <= 0:
        return
    right, empty = (grade.values[0] for grade in grades)
    if 0 < empty >= right:
        name = term.path.rpartition(":")[2]
        message = f"{name} gives an empty completion {empty:g}, and a row's own answer {right:g}"
        hint = "a model learns to say nothing: check the comparison"
        yield Finding(
            key=f"reward.terms.{number}.path", message=message, hint=hint, value=show(term.path), refuses=False
        )


def _in_range(grade: Grade) -> Grade:
    """A value that a run takes for none, as one."""
    if grade.cause or all(abs(value) <= MAX_SCORE for value in grade.values):
        return grade
    return Grade(cause="bad_values", text=f"the reward gave {grade.values[0]:g}, beyond ±{MAX_SCORE:g}")


def _of_another_type(
    number: int, term: Function, grades: Sequence[Grade], table: PromptTable, config: RewardConfig
) -> Iterator[Finding]:
    """A right completion that scores only once the row's answer, a number, is text."""
    answer = table.rows[0].get(config.answer_column)
    if isinstance(answer, str | None) or any(grade.cause for grade in grades):
        return
    right, empty = (grade.values[0] for grade in grades)
    if right > empty:
        return
    rows = [{**table.rows[0], config.answer_column: gold_answer(answer)}]
    as_text = replace(table, rows=rows, prompts=table.prompts[:1])
    again = _graded(term, as_text, [gold_answer(answer)], config)[0]
    if not again.cause and again.values[0] > right:
        name = term.path.rpartition(":")[2]
        message = f"{name} gives a row's own answer {right:g}, and {again.values[0]:g} once it is text: it is a number"
        hint = f'compare with str(row["{config.answer_column}"])'
        yield Finding(
            key=f"reward.terms.{number}.path", message=message, hint=hint, value=show(term.path), refuses=False
        )


def _no_score(number: int, term: Function, grades: Sequence[Grade], table: PromptTable) -> Iterator[Finding]:
    """A function that gave no score for the row's own answer, or for an empty completion."""
    failed = [grade for grade in grades if grade.cause]
    if not failed:
        return
    last, of_code = last_line(failed[0].text), is_of_code(failed[0].cause, failed[0].text)
    name, every = term.path.rpartition(":")[2], len(failed) == len(grades)
    what = "the first row" if every else "an empty completion" if grades[0] not in failed else "a row's own answer"
    message = f"{name}, called with {what}, gives no score: {last}"
    hint = f"call it with the row of {table.wheres[0]}"
    key, value = f"reward.terms.{number}.path", show(term.path)
    yield Finding(key=key, message=message, hint=hint, value=value, refuses=of_code and every)
