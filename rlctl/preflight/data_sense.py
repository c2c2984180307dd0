"""What data files teach, as far as their rows and sizes tell: evaluation on the training prompts, prompts that hold
their answer, answers that none could give, and fewer prompts than a step draws."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from rlctl.preflight.data_rows import Looked
from specs.builtin_tasks import BUILTIN_TASKS
from specs.errors import Problem
from specs.schema.rewards import ExactMatch, compares_answer
from specs.schema.row_values import gold_answer
from specs.schema.sections import is_hub_data
from specs.schema.spec import Spec
from specs.templates import render_template, template_columns
from specs.text import show

_FEW = 4  # rows below which nothing is concluded from what they have in common
_MANY = 30  # rows from which on a single answer is no chance
_COMPARED = 50  # rows whose answers are looked at
_LEAKED = 0.25  # share of evaluation prompts among the training prompts above which it is said
_HELD_OUT, _HELD_OUT_UNASKED = 1 / 2, 2 / 3  # shares of rows that evaluation takes, where the spec says how many
_SENTENCE = 8  # words
_WORKING = re.compile(r"\\boxed\{|\banswer is\b|\banswer:|</think>|<answer>", re.IGNORECASE)
_FORMS = ("\\boxed{", "<answer>", "####")  # that an answer is written in
_WRAPPED = {  # what an answer begins with, and the answer in it
    "\\boxed{": re.compile(r"\$?\\boxed\{.*\}\$?", re.DOTALL),
    "$": re.compile(r"\$[^$]+\$"),
    "<": re.compile(r"<(\w+)>.*</\1>", re.DOTALL),
}
_BLOCK = 1 << 20
_MOST_COMPARED = 1 << 28  # bytes of two files of one size; what follows is taken to be as equal


def sense_problems(spec: Spec, spec_dir: Path, looked: Mapping[str, Looked]) -> tuple[list[Problem], list[Problem]]:
    """Errors and warnings about sources that can be read. `looked`: the first rows of those that are files, by key."""
    errors = list(_same_file(spec, spec_dir))
    if any(found.fault for found in looked.values()):  # which is said, and more of it is seen by the probe
        return errors, []
    warnings = [*_few_rows(spec, spec_dir), *_holds_answer(spec, looked)]
    warnings += [problem for key, found in looked.items() for problem in _one_prompt(key, found, spec)]
    warnings += [problem for key, found in looked.items() for problem in _one_answer(key, found, spec)]
    warnings += [*_most_held_out(spec, spec_dir), *_few_held_out(spec, spec_dir)]
    if not errors:
        warnings += _same_prompts(spec, looked)
    return errors, warnings


# ── evaluation that is training ─────────────────────────────────────────────────────────────────────


def _same_file(spec: Spec, spec_dir: Path) -> Iterator[Problem]:
    """Prompts to evaluate on that are the file of `data.train` under another name, or a copy of it."""
    train = _file(spec.data.train, spec_dir)
    for one in spec.evaluations:
        held, key = _file(one.data, spec_dir) if one.data else None, f"{one.key}.data"
        if train is None or held is None:
            continue
        hint, value = f"leave {key} out to hold rows of data.train out", show(one.data)
        if train.samefile(held):
            yield Problem(key, f"these are the training prompts: it is the file {train.resolve()}", hint, value)
        elif _same_bytes(train, held):
            yield Problem(key, "the same bytes as data.train: these are the training prompts", hint, value)


def _file(source: str, spec_dir: Path) -> Path | None:
    if source.startswith("builtin:") or is_hub_data(source):
        return None
    file = spec_dir / Path(source).expanduser()
    return file if file.is_file() else None


def _same_bytes(one: Path, other: Path) -> bool:
    if one.stat().st_size != other.stat().st_size:
        return False
    with one.open("rb") as mine, other.open("rb") as theirs:
        while (block := mine.read(_BLOCK)) == theirs.read(_BLOCK):
            if not block or mine.tell() >= _MOST_COMPARED:
                return True
    return False


def _same_prompts(spec: Spec, looked: Mapping[str, Looked]) -> Iterator[Problem]:
    if "data.train" not in looked:
        return
    train = {_words(row, spec) for row in looked["data.train"].rows}
    for one in spec.evaluations:
        if (found := looked.get(key := f"{one.key}.data")) is None:
            continue
        held = [_words(row, spec) for row in found.rows[: one.prompts]]
        known = sum(prompt in train for prompt in held)
        if known > _LEAKED * len(held):
            some = f"{known} of its first {len(held)} prompts are"
            whole = f"its first {known} prompts are all"
            message = f"{whole if known == len(held) else some} among the training prompts"
            yield Problem(key, message, "evaluate on prompts that are not trained on", show(one.data))


def _words(row: Mapping[str, Any], spec: Spec) -> str:
    """A prompt without regard to case and spaces."""
    return " ".join(_prompt(row, spec).casefold().split())


def _prompt(row: Mapping[str, Any], spec: Spec) -> str:
    if spec.data.template:
        return render_template(spec.data.template, row)
    prompt = row[spec.data.prompt_column]
    return prompt if isinstance(prompt, str) else repr(prompt)


def _one_prompt(key: str, found: Looked, spec: Spec) -> Iterator[Problem]:
    """Rows that ask the same, although they differ."""
    rows, hint = found.rows, "check data.prompt_column and data.template"
    prompts = [_prompt(row, spec) for row in rows]
    if len(rows) < _FEW or len(set(prompts)) == len(prompts):
        return
    if len(set(prompts)) == 1 and len({repr(row) for row in rows[:_COMPARED]}) >= _FEW:
        message = f"its first {len(rows)} prompts are all the same, and their rows are not"
        yield Problem(key, message, hint, source_of(key, spec))
    elif compares_answer(spec.reward.terms):
        answers: dict[str, set[str]] = {}
        for prompt, row in zip(prompts, rows, strict=True):
            answers.setdefault(prompt, set()).add(gold_answer(row[spec.data.answer_column]))
        torn = sum(len(answers[prompt]) > 1 for prompt in prompts)
        if 2 * torn > len(rows):
            message = f"{torn} of its first {len(rows)} prompts stand there again with another answer"
            yield Problem(key, message, hint, source_of(key, spec))


def _one_answer(key: str, found: Looked, spec: Spec) -> Iterator[Problem]:
    """Rows that ask different things and have the same answer: another column was meant."""
    if not compares_answer(spec.reward.terms) or len(found.rows) < _MANY:
        return
    golds = {gold_answer(row[spec.data.answer_column]) for row in found.rows}
    if len(golds) == 1 and len({_prompt(row, spec) for row in found.rows}) >= _MANY:
        message = f"all of its first {len(found.rows)} answers are {show(golds.pop())}"
        yield Problem(key, message, "check data.answer_column", source_of(key, spec))


# ── prompts that hold their answer ──────────────────────────────────────────────────────────────────


def _holds_answer(spec: Spec, looked: Mapping[str, Looked]) -> Iterator[Problem]:
    data = spec.data
    if not compares_answer(spec.reward.terms):
        return
    if data.template and data.answer_column in template_columns(data.template):
        message = f"holds {{{data.answer_column}}}, which the completion is compared with"
        yield Problem("data.template", message, "right only if the model is to copy it", show(data.template))
        return
    if not data.template and data.prompt_column == data.answer_column:
        key = "answer_column" if "answer_column" in data.model_fields_set else "prompt_column"
        message = "the prompt is the answer: the completion is compared with the same column"
        yield Problem(f"data.{key}", message, "right only if the model is to copy it", show(data.answer_column))
        return
    for key, found in looked.items():
        yield from _of_rows(key, source_of(key, spec), found.rows[:_COMPARED], spec)


def _of_rows(key: str, source: str, rows: tuple[Mapping[str, Any], ...], spec: Spec) -> Iterator[Problem]:
    column = spec.data.answer_column
    golds = [gold_answer(row[column]) for row in rows]
    ends = [_ends_with(last_text(row, spec), gold) for row, gold in zip(rows, golds, strict=True)]
    texts = [all_text(row, spec) for row in rows]
    if len(set(golds)) >= _FEW and all(ends):
        message = f"each of its first {len(rows)} prompts ends with its answer"
        yield Problem(key, message, "leave the answer out of the prompt, unless the model is to copy it", source)
    elif len(set(golds)) >= _FEW and _told(texts, golds):
        message = f"each of its first {len(rows)} prompts says its answer, such as {show(golds[0])}"
        yield Problem(key, message, "leave the answer out of the prompt", source)
    elif len(set(golds)) >= _FEW and all(text.strip() == gold for text, gold in zip(texts, golds, strict=True)):
        message = f"each of its first {len(rows)} prompts is its answer"
        yield Problem(key, message, "check data.prompt_column and data.answer_column", source)
    elif _exact(spec) and (form := _asked_form(texts, golds, spec)):
        message = f"its prompts ask for {form}, and exact_match compares all that the completion says"
        yield Problem(key, message, "grade with math_verify, or with a function that reads the form", source)
    elif _exact(spec) and (form := _unasked_form(texts, golds, spec)):
        message = f"column {column!r} writes every answer as {form}, which no prompt asks for, and exact_match compares"
        yield Problem(key, message, "write the answer alone into the column, or ask for the form", source)
    whole = [row[column] for row in rows if isinstance(row[column], float)]
    if whole and all(value.is_integer() for value in whole) and _exact(spec):
        message = f"column {column!r} is {whole[0]}, and only a completion that says so is right"
        yield Problem(key, message, "write whole numbers as such, or use math_verify", source)
    pointed = [gold for row, gold in zip(rows, golds, strict=True) if isinstance(row[column], str)]
    asked = any(("decimal" in text and "without" not in text) or ".0" in text for text in (spec.data.system, *texts))
    if len(pointed) >= _FEW and all(re.fullmatch(r"-?\d+\.0", gold) for gold in pointed) and _exact(spec) and not asked:
        message = (
            f"column {column!r} writes whole numbers as {show(golds[0])}, and only a completion that does is right"
        )
        yield Problem(key, message, "write them without .0, or use math_verify", source)
    said = sorted({gold for row, gold in zip(rows, golds, strict=True) if isinstance(row[column], bool)})
    if said and any(isinstance(term, ExactMatch) and not term.ignore_case for term in spec.reward.terms):
        message = f"column {column!r} is true or false, and only a completion that says {' or '.join(said)} is right"
        yield Problem(key, message, "write the answers as text, or set ignore_case", source)
    if golds and _exact(spec) and all(len(gold.split()) >= _SENTENCE and _WORKING.search(gold) for gold in golds):
        message = f"column {column!r} holds worked solutions, and only a completion that is equal to one is right"
        yield Problem(key, message, "name the column with the final answer, or use math_verify", source)


def _asked_form(texts: Sequence[str], golds: Sequence[str], spec: Spec) -> str:
    """What every prompt asks an answer to be written in, where no answer is; "" of none."""
    asked = [f"{spec.data.system}\n{text}" for text in texts]
    for form in _FORMS:
        if asked and all(form in text for text in asked) and not any(form in gold for gold in golds):
            return form
    return ""


def _unasked_form(texts: Sequence[str], golds: Sequence[str], spec: Spec) -> str:
    """What every answer is written in, and no prompt shows; "" of none."""
    asked = "\n".join([spec.data.system, *texts])
    for form, whole in _WRAPPED.items():
        if len(golds) >= _FEW and all(whole.fullmatch(gold) for gold in golds) and form not in asked:
            return show(golds[0], 40)
    return ""


def _told(texts: Sequence[str], golds: Sequence[str]) -> bool:
    """Whether each prompt says "the answer is …" of its own answer, and not of another row's as a list of choices."""
    for number, (text, gold) in enumerate(zip(texts, golds, strict=True)):
        others = [other for other in dict.fromkeys(golds) if other != gold]
        other = others[number % len(others)]
        if not _says(text, gold) or _says(text, other):
            return False
    return True


def _says(text: str, answer: str) -> bool:
    said = rf"\b(?:answer|solution|result|label|target)\b[^.\n]{{0,40}}(?<!\w){re.escape(answer)}(?!\w)"
    return re.search(said, text, re.IGNORECASE) is not None


def _exact(spec: Spec) -> bool:
    return any(isinstance(term, ExactMatch) for term in spec.reward.terms)


def source_of(key: str, spec: Spec) -> str:
    """The source that a key names, as a problem shows it."""
    held = {f"{one.key}.data": one.data for one in spec.evaluations}
    return show(held.get(key, spec.data.train))


def last_text(row: Mapping[str, Any], spec: Spec) -> str:
    """The row's prompt, of messages the last one's content; "" of one that is no text."""
    prompt = "" if spec.data.template else row[spec.data.prompt_column]
    last = prompt[-1]["content"] if isinstance(prompt, list) else prompt or _prompt(row, spec)
    return last if isinstance(last, str) else ""


def all_text(row: Mapping[str, Any], spec: Spec) -> str:
    """All text of the row's prompt: of messages that of each, a line of its own."""
    prompt = "" if spec.data.template else row[spec.data.prompt_column]
    if not isinstance(prompt, list):
        return _prompt(row, spec)
    return "\n".join(one["content"] for one in prompt if isinstance(one["content"], str))


def _ends_with(prompt: str, answer: str) -> bool:
    """Whether the last word of the prompt is the answer, and not only part of a number or a word."""
    text = prompt.rstrip(" \n\t.!*")
    before = text[-len(answer) - 1 : -len(answer)]
    return text.endswith(answer) and text != answer and not (before + answer[:1]).isalnum()


# ── fewer prompts than a step draws ─────────────────────────────────────────────────────────────────


def held_out_problems(spec: Spec, spec_dir: Path) -> list[Problem]:
    """Sets that leave no row of `data.train` to train on. Reads only as many rows as it needs."""
    held = next((one for one in spec.evaluations if not one.data), None)
    if held is None:
        return []
    rows = _count_rows(spec.data.train, spec_dir, held.prompts + 1)
    if rows is None or rows > held.prompts:
        return []
    message = f"holding them out leaves none of the {rows} rows of data.train to train on"
    hint = f"use fewer than {rows}, or name another source in {held.key}.data"
    return [Problem(f"{held.key}.prompts", message, hint, str(held.prompts))]


def _few_rows(spec: Spec, spec_dir: Path) -> Iterator[Problem]:
    """A source that gives a step the same prompt twice."""
    held_out = sum(one.prompts for one in spec.evaluations if not one.data)
    step, most = spec.data.prompts_per_step, spec.data.max_rows
    counted = _count_rows(spec.data.train, spec_dir, step + held_out)
    found = [rows for rows in (counted, most) if rows is not None]
    rows = min(found, default=step + held_out) - held_out
    if rows >= step or rows < 1:  # none are left for training: `held_out_problems` says so
        return
    cut = most is not None and (counted is None or most < counted)
    key, value = ("data.max_rows", str(most)) if cut else ("data.train", show(spec.data.train))
    message = f"has {rows} rows to train on, and a step draws {step}: it sees prompts twice"
    yield Problem(key, message, "lower data.prompts_per_step, and raise algorithm.group_size", value)


def _most_held_out(spec: Spec, spec_dir: Path) -> Iterator[Problem]:
    """An evaluation that takes more of the rows than it leaves to train on."""
    held = next((one for one in spec.evaluations if not one.data), None)
    if held is None:
        return
    counted, most = _count_rows(spec.data.train, spec_dir, 2 * held.prompts), spec.data.max_rows
    rows = min((one for one in (counted, most) if one is not None), default=2 * held.prompts)
    share = _HELD_OUT if "prompts" in held.given else _HELD_OUT_UNASKED
    if share * rows < held.prompts < rows:
        message = f"takes {held.prompts} of the {rows} rows of data.train, and leaves {rows - held.prompts} to train on"
        hint = f"a tenth is usual, or name another source in {held.key}.data"
        yield Problem(f"{held.key}.prompts", message, hint, str(held.prompts))


def _few_held_out(spec: Spec, spec_dir: Path) -> Iterator[Problem]:
    """A source that has fewer prompts than the spec asks for in so many words."""
    for one in spec.evaluations:
        if not one.data or "prompts" not in one.given:
            continue
        rows = _count_rows(one.data, spec_dir, one.prompts)
        if rows is not None and rows < one.prompts:
            message = f"{one.key}.data has {rows} rows: evaluation is on fewer prompts"
            yield Problem(f"{one.key}.prompts", message, f"use at most {rows}", str(one.prompts))


def _count_rows(source: str, spec_dir: Path, enough: int) -> int | None:
    """Rows of a source, counted up to `enough`; None where they cannot be counted without loading them."""
    if (task := BUILTIN_TASKS.get(source.removeprefix("builtin:"))) is not None:
        return sum(1 for _ in islice(task(), enough))
    file = _file(source, spec_dir)
    if file is None:
        return None
    if file.suffix == ".jsonl":
        with file.open("rb") as stream:
            return sum(1 for _ in islice((line for line in stream if line.strip()), enough))
    import pyarrow.parquet as parquet

    return int(parquet.read_metadata(file).num_rows)
