"""Texts of data rows that are something else: lists and bytes as Python or JSON writes them, and prompts in chat markup
that the chat template wraps once more."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rlctl.preflight.data_rows import Looked
from rlctl.preflight.data_sense import last_text, source_of
from specs.errors import Problem
from specs.schema.rewards import compares_answer
from specs.schema.spec import Spec

_ROWS = 50  # that are looked at; all of them must be alike
_MESSAGES = re.compile(r"""\s*(?:array\()?\[\s*\{\s*["'](?:role|content|from|value)["']\s*:""")
_BYTES = re.compile(r"""b(["']).*\1\Z""", re.DOTALL)
_NO_VALUES = {"nan", "NaN", "NaT", "None", "null", "NULL", "<NA>"}  # as pandas and databases write them into text
_SHARE = 0.1  # of rows from which on such a trace is no chance
_MOJIBAKE = re.compile("\u00c3[\u0080-\u00bf]|\u00e2\u20ac|\u00c2[\u00a0-\u00bf]")
_ESCAPED = re.compile(r"\\n(?![a-z])")
_ENTITY = re.compile(r"&(?:amp|lt|gt|quot|apos|nbsp|#\d{2,5});")
_PLACE = re.compile(r"(?<![\\\w}])\{(?:question|prompt|input|instruction|problem|query|context|text)\}")
# Tokens by which templates of all families mark who speaks, as they stand in text.
_MARKUP = re.compile(r"<[|｜][^<>|｜\s]{1,40}[|｜]>|<(?:start|end)_of_turn>|\[/?INST\]")
_SPEAKER = re.compile(r"user|assistant|system|im_|turn|header|INST", re.IGNORECASE)


def text_warnings(spec: Spec, looked: Mapping[str, Looked], template: str) -> Iterator[Problem]:
    """Warnings about sources whose rows can be used. `template`: the model's chat template, as far as it is known."""
    for key, found in looked.items():
        rows = found.rows[:_ROWS]
        if rows and not found.fault:
            seen = (*_written_out(rows, spec), *_marked_twice(rows, spec, template), *_misread(found.rows, spec))
            for message, hint in seen:
                yield Problem(key, message, hint, source_of(key, spec))


def _written_out(rows: Sequence[Mapping[str, Any]], spec: Spec) -> Iterator[tuple[str, str]]:
    """Columns whose text stands for another value."""
    data = spec.data
    if not data.template and all(_matches(_MESSAGES, row[data.prompt_column]) for row in rows):
        message = f"column {data.prompt_column!r} holds lists of messages written out as text"
        yield message, "write the lists themselves into the file (json.loads or ast.literal_eval of the column)"
    columns = [] if data.template else [data.prompt_column]
    if compares_answer(spec.reward.terms):
        columns.append(data.answer_column)
        values = [row[data.answer_column] for row in rows]
        if all(map(_holds_one, values)):
            message = f"column {data.answer_column!r} holds {values[0]!r}: another value, written out as text"
            yield message, "write the answer itself into the column"
    for column in columns:
        if all(_matches(_BYTES, row[column]) for row in rows):
            message = f"column {column!r} holds bytes as Python writes them, such as {rows[0][column][:20]!r}"
            yield message, "decode them before they are written: value.decode()"


def _matches(pattern: re.Pattern[str], value: Any) -> bool:
    return isinstance(value, str) and pattern.match(value) is not None


def _holds_one(value: Any) -> bool:
    """Whether a text is a list of one text, or an array or a dict as only Python writes it."""
    if not isinstance(value, str) or value[:1] not in ("[", "{", "a"):
        return False
    if value.startswith("array("):
        return True
    try:
        read = ast.literal_eval(value)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return False
    if isinstance(read, list):
        return len(read) == 1 and isinstance(read[0], str)
    return isinstance(read, dict) and not _is_json(value)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _misread(rows: Sequence[Mapping[str, Any]], spec: Spec) -> Iterator[tuple[str, str]]:
    """Traces of a program that read or wrote the file in a wrong way."""
    data, texts = spec.data, [last_text(row, spec) for row in rows]
    if not data.template and rows[0][data.prompt_column] == data.prompt_column:
        yield "its first row holds the names of the columns", "leave the header out"
    if compares_answer(spec.reward.terms):
        empty = [gold for row in rows if (gold := str(row[data.answer_column]).strip()) in _NO_VALUES]
        if len(empty) > _SHARE * len(rows) and len(set(empty)) == 1:  # a program writes all that is missing in one way
            message = f"column {data.answer_column!r} is {empty[0]!r} in {len(empty)} of its first {len(rows)} rows"
            yield message, "leave out the rows that have no answer"
    if sum(_MOJIBAKE.search(text) is not None for text in texts) > _SHARE * len(texts):
        yield "prompts hold UTF-8 that was read as Latin-1, such as Ã© for é", "read the source as UTF-8"
    if sum(_ENTITY.search(text) is not None for text in texts) > _SHARE * len(texts):
        yield "prompts hold HTML's entities, such as &amp; for &", "write the text itself: html.unescape"
    if all(_PLACE.search(text) for text in texts):
        left = _PLACE.findall(texts[0])[0]
        yield (
            f"prompts hold {left}, where something was to be put in",
            "fill it in, or use data.template",
        )
    if all("\n" not in text and len(_ESCAPED.findall(text)) > 1 for text in texts):
        yield r"prompts hold \n as two characters, and no line break", "write the file with a library for JSON"


def _marked_twice(rows: Iterable[Mapping[str, Any]], spec: Spec, template: str) -> Iterator[tuple[str, str]]:
    """Prompts that are in chat markup before the chat template puts them into it."""
    if spec.data.chat == "never" or not template:
        return
    in_all = set.intersection(*(set(_MARKUP.findall(last_text(row, spec))) for row in rows))
    marks = sorted(mark for mark in in_all if mark in template or _SPEAKER.search(mark))
    if marks:
        message = f"prompts are in chat markup already ({', '.join(marks)}), and the chat template wraps them again"
        yield message, 'set data.chat = "never", or leave the markup out'
