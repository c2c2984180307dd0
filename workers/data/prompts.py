"""Turns data rows into prompts: template, chat template, tokens, and counts of skipped rows."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backends.hf.tokenizer import TextCodec
from specs.errors import DataError
from specs.schema.row_values import blank_answer, ends_with_answer, not_a_value
from specs.schema.sections import DataSection
from specs.templates import render_template, template_columns
from specs.wire.batch import Column
from workers.chat_renderer import ChatRenderer, ChatTemplateError, renderer_of
from workers.data.row_source import DataRow

ENCODE_ROWS = 2048  # rows per call of the tokenizer


@dataclass
class PromptTable:
    """Prompts that can be drawn. `tokens` holds all of them one after another; prompt `i` is
    `tokens[offsets[i]:offsets[i + 1]]`. A row's index here is its `row_B`."""

    source: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    prompts: list[str] = field(default_factory=list)  # the text that the model sees
    wheres: list[str] = field(default_factory=list)
    tokens: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    offsets: NDArray[np.int64] = field(default_factory=lambda: np.zeros(1, dtype=np.int64))
    dropped_bad: int = 0
    first_bad: str = ""
    dropped_overlong: int = 0
    first_overlong: str = ""
    longest_prompt_tokens: int = 0  # of all rows, including dropped ones

    def __len__(self) -> int:
        return len(self.rows)

    def prompt_tokens(self, row: int) -> NDArray[np.int64]:
        return self.tokens[self.offsets[row] : self.offsets[row + 1]]

    def rows_of(
        self, row_B: Column, columns: Sequence[str] | None, conversations: DataSection | None = None
    ) -> dict[str, dict[str, Any]]:
        """Rows by number, as JSON for a scorer: location of the row, its prompt as text,
        and its values in `columns` (None: all). Values that JSON does not know (dates, decimals, bytes) are text.
        `conversations`: the section that says how a row becomes messages, where these are to go along."""
        return {
            str(row): {
                "where": self.wheres[row],
                "prompt": self.prompts[row],
                "values": _plain(self.rows[row], columns),
                **({} if conversations is None else {"messages": _told(self.rows[row], conversations)}),
            }
            for row in np.unique(row_B).tolist()
        }


def _told(values: Mapping[str, Any], data: DataSection) -> list[dict[str, Any]]:
    """The conversation that a row's prompt was made from; of plain text, one message of the user."""
    told: list[dict[str, Any]] = json.loads(json.dumps(messages_of(prompt_of(values, data), data), default=str))
    return told


def _plain(values: Mapping[str, Any], columns: Sequence[str] | None) -> dict[str, Any]:
    kept = values if columns is None else {name: values[name] for name in columns if name in values}
    plain: dict[str, Any] = json.loads(json.dumps(kept, default=str))
    return plain


def build_table(
    source: str,
    rows: Iterable[DataRow],
    data: DataSection,
    codec: TextCodec,
    needs_answer: bool,
    needs_columns: Sequence[str] = (),
) -> PromptTable:
    """Read, render and tokenise all rows. `needs_answer`: a reward compares with `data.answer_column`; `needs_columns`:
    what else scoring reads of every row.

    Raises DataError on a bad or overlong row where the spec refuses them, and when no row is left.
    """
    table = read_table(source, rows, data, codec, needs_answer, needs_columns)
    _refuse_overlong_or_empty(table, data)
    return table


def read_table(
    source: str,
    rows: Iterable[DataRow],
    data: DataSection,
    codec: TextCodec,
    needs_answer: bool,
    needs_columns: Sequence[str] = (),
) -> PromptTable:
    """As `build_table`, but overlong rows are only counted, and the table may be empty."""
    chat = uses_chat(data, codec)
    table, lengths, pieces = PromptTable(source), [0], []
    pending: list[tuple[DataRow, str]] = []

    def flush() -> None:
        encoded = codec.encode([text for _, text in pending], rendered=chat)
        for (row, text), ids in zip(pending, encoded, strict=True):
            if _admit(table, row, ids, data):
                table.rows.append(row.values)
                table.prompts.append(text)
                table.wheres.append(row.where)
                lengths.append(len(ids))
                pieces.append(np.array(ids, dtype=np.int64))
        pending.clear()

    with renderer_of(codec) if chat else nullcontext() as chats:
        render = _Renderer(data, chats, needs_answer, needs_columns)
        for row in rows:
            try:
                pending.append((row, render(row)))
            except _BadRow as error:
                _bad(table, row, str(error), data)
            if len(pending) >= ENCODE_ROWS:
                flush()
    flush()
    table.tokens = np.concatenate(pieces) if pieces else table.tokens
    table.offsets = np.cumsum(lengths, dtype=np.int64)
    return table


def uses_chat(data: DataSection, codec: TextCodec) -> bool:
    """Whether prompts go through the chat template. Raises DataError if the spec needs one that is missing."""
    if data.chat == "always" and not codec.has_chat_template:
        hint = 'use an instruct model, or set data.chat = "never"'
        raise DataError(f'data.chat = "always": the tokenizer of {codec.model_path} has no chat template', hint=hint)
    chat = data.chat != "never" and codec.has_chat_template
    if data.system and not chat:
        hint = "take data.system out, or put its text into data.template"
        raise DataError("data.system has no effect: prompts do not go through a chat template", hint=hint)
    return chat


class _BadRow(ValueError):
    """The reason why a row cannot become a prompt."""


class _Renderer:
    """Renders a row as the text that the model sees. Raises _BadRow."""

    def __init__(
        self, data: DataSection, chats: ChatRenderer | None, needs_answer: bool, needs_columns: Sequence[str]
    ) -> None:
        self.data, self.chats = data, chats
        columns = template_columns(data.template) if data.template else (data.prompt_column,)
        answer = (data.answer_column,) if needs_answer else ()
        self.columns = tuple(dict.fromkeys((*columns, *answer, *needs_columns)))
        self.needs_answer = needs_answer
        self.in_template = template_columns(data.template)

    def __call__(self, row: DataRow) -> str:
        if row.problem:
            raise _BadRow(row.problem)
        self._check_columns(row.values)
        text = self._text(row.values)
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise _BadRow("the prompt holds half of a surrogate pair, which is not text") from None
        if not text:
            raise _BadRow("the prompt is empty")
        return text

    def _check_columns(self, values: Mapping[str, Any]) -> None:
        for column in self.columns:
            if values.get(column) is None:
                lacks = f"column {column!r} is null" if column in values else f"no column {column!r}"
                raise _BadRow(f"{lacks}; the row has {', '.join(map(repr, values)) or 'none'}")
            if said := not_a_value(values[column]):
                raise _BadRow(f"column {column!r} is {said}")
            if self.data.template and isinstance(values[column], dict | list) and column in self.in_template:
                raise _BadRow(f"column {column!r} is {type(values[column]).__name__}, which no template can write")
        if self.needs_answer:
            self._check_answer(values[self.data.answer_column])

    def _check_answer(self, answer: Any) -> None:
        column = f"column {self.data.answer_column!r}"
        if not isinstance(answer, str | int | float):
            raise _BadRow(f"{column} must be text or a number, not {type(answer).__name__}")
        if said := blank_answer(answer):
            raise _BadRow(f"{column} {said}")

    def _text(self, values: Mapping[str, Any]) -> str:
        prompt = prompt_of(values, self.data)
        if self.chats is None:
            if isinstance(prompt, str):
                return prompt
            why = "the tokenizer has no chat template" if self.data.chat != "never" else 'data.chat = "never"'
            raise _BadRow(f"column {self.data.prompt_column!r} is {type(prompt).__name__}, not text, and {why}")
        try:
            return self.chats.render(messages_of(prompt, self.data))
        except ChatTemplateError as error:
            raise _BadRow(str(error)) from error


def prompt_of(values: Mapping[str, Any], data: DataSection) -> Any:
    """A row's prompt before any chat template: text, or messages."""
    return render_template(data.template, values) if data.template else values[data.prompt_column]


def messages_of(prompt: Any, data: DataSection) -> list[dict[str, Any]]:
    """What the chat template is given for a prompt. Raises ValueError where it is not one."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else _messages(prompt)
    if data.system and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": data.system}, *messages]
    return messages


def _messages(prompt: Any) -> list[dict[str, Any]]:
    messages = prompt if isinstance(prompt, list) else []
    if not messages or not all(_is_message(one) for one in messages):
        raise _BadRow("a prompt is text, or a list of messages with role and content")
    if ends_with_answer(messages):
        raise _BadRow("the prompt ends with the assistant's own answer, which the model is to write")
    return messages


def _is_message(one: Any) -> bool:
    return isinstance(one, dict) and isinstance(one.get("role"), str) and "content" in one


def _admit(table: PromptTable, row: DataRow, ids: list[int], data: DataSection) -> bool:
    """Count a prompt that is too long or empty; returns True if it may be drawn."""
    table.longest_prompt_tokens = max(table.longest_prompt_tokens, len(ids))
    if not ids:
        _bad(table, row, "the prompt has no tokens", data)
        return False
    if len(ids) <= data.max_prompt_tokens:
        return True
    table.dropped_overlong += 1
    table.first_overlong = table.first_overlong or f"{row.where} has {len(ids)}"
    return False


def _bad(table: PromptTable, row: DataRow, problem: str, data: DataSection) -> None:
    if data.bad_rows == "refuse":
        hint = 'fix the row, or set data.bad_rows = "drop" to leave such rows out'
        raise DataError(f"{row.where}: {problem}", hint=hint)
    table.dropped_bad += 1
    table.first_bad = table.first_bad or f"{row.where}: {problem}"


def _refuse_overlong_or_empty(table: PromptTable, data: DataSection) -> None:
    limit = f"data.max_prompt_tokens = {data.max_prompt_tokens}"
    if table.dropped_overlong and data.overlong == "refuse":
        raise DataError(
            f"{table.dropped_overlong} prompts of {table.source} are longer than {limit}; "
            f"the first, {table.first_overlong}, the longest has {table.longest_prompt_tokens}",
            hint='raise data.max_prompt_tokens, or set data.overlong = "drop"',
        )
    if not len(table):
        why = [f"{table.dropped_overlong} are longer than {limit}"] if table.dropped_overlong else []
        why += [f"{table.dropped_bad} are bad, the first: {table.first_bad}"] if table.dropped_bad else []
        hint = "check the file, data.prompt_column, data.template and data.max_prompt_tokens"
        raise DataError(f"{table.source}: no prompt is left ({'; '.join(why) or 'the file has no rows'})", hint=hint)
