"""Whether the rows of a data file parse and have the columns and types that the spec needs.

Files of usual size are checked as a whole, of others the first rows; `check-config --probe` goes on, and the data role
reads all of them when a run starts, and refuses the same ones (`workers/data/prompts.py`).
"""

from __future__ import annotations

import codecs
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlctl.models.weight_files import LFS
from specs.schema.rewards import Judge, compares_answer, judged_columns
from specs.schema.row_values import blank_answer, ends_with_answer, not_a_value
from specs.schema.spec import Spec
from specs.templates import template_columns
from specs.text import not_text
from workers.data.row_source import parquet_rows

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

BYTES_LOOKED_AT = 8 << 20
PARQUET_ROWS_LOOKED_AT = 10_000
_BATCH_ROWS = 1000
_DROPPED_TOLD = 50  # first rows of which it is told that some are dropped,
_DROPPED_SHARE = 0.1  # where these are more than so many of them
_NAME_COLUMNS = "name the columns with data.prompt_column, data.answer_column or data.template"
_NAME_ANOTHER = "name the column that holds it, or make it text in the file"
_REPAIR = 'fix the row, or set data.bad_rows = "drop"'
_OBJECT_PER_LINE = "write one JSON object per line, such as `jq -c .[]` does of a list"
_PULL = "fetch it: `git lfs pull` in its folder"
_ANEW = "write the file again"


@dataclass(frozen=True)
class Fault:
    """What is wrong with a data file, and what to do about it. `of_a_row`: a row that `data.bad_rows` may drop; its
    message starts with `name:line`."""

    message: str
    hint: str = _REPAIR
    of_a_row: bool = False

    def at(self, file: Path, row: int) -> Fault:
        """The same, of a row of a file, counted from 1."""
        return replace(self, message=f"{file.name}:{row} {self.message}", of_a_row=True)


@dataclass(frozen=True)
class Looked:
    """What is wrong with a file, if anything, and the rows before that."""

    rows: tuple[Mapping[str, Any], ...]
    fault: Fault | None = None


def look_at_rows(file: Path, spec: Spec, *, chat: bool, most: int | None = None) -> Looked:
    """Rows of a `.jsonl` or `.parquet` file, up to the first that is wrong. `chat`: whether a prompt may be a list of
    messages, for all that is known. `most`: rows that a run reads."""
    rows: list[Mapping[str, Any]] = []
    dropped: list[Fault] = []  # of the first rows
    seen, drops = 0, spec.data.bad_rows == "drop"
    try:
        if _begins_as(file, LFS):
            return Looked((), Fault("a pointer of Git LFS, not the file itself", _PULL))
        found_rows = _jsonl(file, spec, chat) if file.suffix == ".jsonl" else _parquet(file, spec, chat)
        for seen, found in enumerate(islice(found_rows, most), 1):
            if not isinstance(found, Fault):
                rows.append(found)
            elif not (found.of_a_row and drops):
                return Looked(tuple(rows), found)
            elif seen <= _DROPPED_TOLD:
                dropped.append(found)
            if seen == _DROPPED_TOLD and len(dropped) > _DROPPED_SHARE * seen:
                return Looked(tuple(rows), dropped[0])
    except OSError as error:
        return Looked((), Fault(f"cannot be read: {error.strerror or error}", _ANEW))
    many = len(dropped) > _DROPPED_SHARE * min(seen, _DROPPED_TOLD)
    return Looked(tuple(rows), dropped[0] if many else None)


def _begins_as(file: Path, text: str) -> bool:
    with file.open("rb") as stream:
        return stream.read(len(text)) == text.encode()


def _jsonl(file: Path, spec: Spec, chat: bool) -> Iterator[Mapping[str, Any] | Fault]:
    rows = size = 0
    with file.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            size += len(line)
            if rows and size > BYTES_LOOKED_AT:
                return
            if not line.strip():
                continue
            rows += 1
            row = _parsed(line.removeprefix(codecs.BOM_UTF8) if number == 1 else line, first=number == 1)
            fault = row if isinstance(row, Fault) else missing_column(row, spec) or _unusable(row, spec, chat)
            yield fault.at(file, number) if fault else row
    if not rows:
        yield Fault("the file is empty", "write one JSON object per line into it")


def _parquet(file: Path, spec: Spec, chat: bool) -> Iterator[Mapping[str, Any] | Fault]:
    if not _ends_are_parquet(file):
        yield Fault("not a Parquet file, or truncated", _ANEW)
        return
    import pyarrow.parquet as parquet  # costs a quarter second: only where there is such a file

    try:
        found = parquet.ParquetFile(file)
    except (OSError, ValueError):  # pyarrow's own errors are kinds of these
        yield Fault("not a Parquet file, or damaged", _ANEW)
        return
    if found.metadata.num_rows == 0:
        yield Fault("the file is empty", "write rows into it, or name another file")
        return
    if fault := missing_column(found.schema_arrow.names, spec):
        yield fault
        return
    rows = _rows_of(found, needed_columns(spec))
    for number, row in enumerate(islice(rows, PARQUET_ROWS_LOOKED_AT), 1):
        if isinstance(row, Fault):
            yield row
        elif isinstance(row, str):
            yield Fault(f"cannot be used: {row}").at(file, number)
        else:
            fault = _unusable(row, spec, chat)
            yield fault.at(file, number) if fault else row


def _rows_of(file: ParquetFile, columns: list[str]) -> Iterator[Mapping[str, Any] | str | Fault]:
    try:
        for batch in file.iter_batches(_BATCH_ROWS, columns=columns):
            yield from parquet_rows(batch)
    except (OSError, ValueError):
        yield Fault("its rows cannot be read: the file is damaged", _ANEW)


def _ends_are_parquet(file: Path) -> bool:
    with file.open("rb") as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(0)
        head = stream.read(4)
        stream.seek(max(0, size - 4))
        return size >= 12 and head == stream.read(4) == b"PAR1"


# ── a row ─────────────────────────────────────────────────────────────────────────────────────────


def _parsed(line: bytes, *, first: bool) -> dict[str, Any] | Fault:
    """The JSON object on a line, or what is wrong with the line."""
    if line.startswith(b"\x1f\x8b"):
        return Fault("is compressed (gzip)", "decompress it (gunzip) and use the result")
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return Fault(f"is not UTF-8 (byte {error.start} of the line)", "save it as UTF-8")
    except (ValueError, RecursionError) as error:
        if first and line.strip() in (b"{", b"["):
            return Fault("starts a list or an object that continues on the next line", _OBJECT_PER_LINE)
        place = f" (character {error.pos + 1})" if isinstance(error, json.JSONDecodeError) else ""
        return Fault(f"is not JSON{place}: {line.decode('utf-8').strip()[:60]}")
    if isinstance(row, list) and row and isinstance(row[0], dict):
        return Fault("starts a list of objects", _OBJECT_PER_LINE)
    if not isinstance(row, dict):
        return Fault(f"is not a JSON object but {_type(row)}")
    half = not_text(row) if b"\\u" in line else ""
    return Fault(f"cannot be used: {half}") if half else row


def needed_columns(spec: Spec) -> list[str]:
    """Columns that the prompt and the built-in rewards read."""
    data = spec.data
    columns = [*template_columns(data.template)] if data.template else [data.prompt_column]
    if compares_answer(spec.reward.terms):
        columns.append(data.answer_column)
    return list(dict.fromkeys((*columns, *judged_columns(spec.reward.terms))))


def missing_column(has: Iterable[str], spec: Spec) -> Fault | None:
    """The first needed column that the row lacks."""
    missing = [name for name in needed_columns(spec) if name not in set(has)]
    if not missing:
        return None
    for index, term in enumerate(spec.reward.terms):
        if isinstance(term, Judge) and missing[0] in term.columns:
            message = f"has no column {missing[0]!r}, which reward.terms.{index}.prompt names"
            return Fault(f"{message}; it has {', '.join(map(repr, has)) or 'none'}", "name a column of the rows there")
    return Fault(f"has no column {missing[0]!r}; it has {', '.join(map(repr, has)) or 'none'}", _NAME_COLUMNS)


def _unusable(row: Mapping[str, Any], spec: Spec, chat: bool) -> Fault | None:
    """What is wrong with the values of a row that has all columns."""
    data = spec.data
    for name in needed_columns(spec):
        value = row[name]
        if value is None:
            return Fault(f"column {name!r} is null")
        if said := not_a_value(value):
            return Fault(f"column {name!r} is {said}")
        if isinstance(value, dict | list) and name in template_columns(data.template):
            return Fault(f"column {name!r} is {_type(value)}, which data.template cannot write", _NAME_ANOTHER)
        if name == data.prompt_column and not data.template and not isinstance(value, str | list):
            return Fault(f"column {name!r} is {_type(value)}; a prompt is text or a list of messages", _NAME_ANOTHER)
        if name == data.answer_column and not isinstance(value, str | int | float):
            return Fault(f"column {name!r} is {_type(value)}; an answer is text or a number", _NAME_ANOTHER)
    if compares_answer(spec.reward.terms) and (said := blank_answer(row[data.answer_column])):
        return Fault(f"column {data.answer_column!r} {said}")
    return None if data.template else _bad_prompt(row[data.prompt_column], spec, chat)


def _bad_prompt(prompt: str | list[Any], spec: Spec, chat: bool) -> Fault | None:
    column, bare = f"column {spec.data.prompt_column!r}", spec.data.chat == "never"
    if prompt == "" and bare:
        return Fault(f"{column} is empty")
    if isinstance(prompt, str):
        return None
    if bare:
        hint = 'set data.chat = "auto", or write the prompt as text'
        return Fault(f'{column} is a list of messages, and data.chat = "never"', hint)
    if not (prompt and all(map(_is_message, prompt))):
        return Fault(f"{column} is a list, but not of messages with role and content")
    for message in prompt:
        if fault := _bad_content(message["content"], message["role"], column):
            return fault
    if ends_with_answer(prompt):
        hint = "leave the assistant's last message out: the model is to write it"
        return Fault(f"{column} ends with the assistant's own answer", hint)
    if not chat:
        hint = "use a model with a chat template, or write the prompt as text"
        return Fault(f"{column} is a list of messages, and {spec.model.path} has no chat template", hint)
    return None


def _bad_content(content: Any, role: str, column: str) -> Fault | None:
    if content is None and role == "user":
        return Fault(f"{column} has a user message without content")
    if content is not None and not isinstance(content, str | list):
        return Fault(f"{column} has a {role} message whose content is {_type(content)}")
    return None


def _is_message(one: Any) -> bool:
    return isinstance(one, Mapping) and isinstance(one.get("role"), str) and "content" in one


def _type(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number"}
    return "null" if value is None else names.get(type(value), type(value).__name__)
