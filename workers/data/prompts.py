"""Turns data rows into prompts: template, chat template, tokens, and counts of skipped rows."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

from specs.errors import DataError
from specs.schema.row_values import blank_answer, ends_with_answer, not_a_value
from specs.schema.sections import DataSection
from specs.templates import render_template, template_columns
from workers.chat.chat_renderer import ChatRenderer
from workers.data.conversations import checked_messages, no_template, rendered, tools_of
from workers.data.row_source import BadRow, DataRow, DroppedRows, in_order, lacking
from workers.joined_text import TextTokens, begun

if TYPE_CHECKING:
    from backends.hf.tokenizer import TextCodec
    from specs.wire.batch import Column
    from specs.wire.role_config import DataConfig

ENCODE_ROWS = 2048  # rows per call of the tokenizer

Messages = list[dict[str, Any]]


@dataclass
class PromptTable(DroppedRows):
    """Prompts that can be drawn. `tokens` holds all of them one after another; prompt `i` is
    `tokens[offsets[i]:offsets[i + 1]]`. A row's index here is its `row_B`."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    prompts: list[str] = field(default_factory=list)  # as text, before the tokenizer
    wheres: list[str] = field(default_factory=list)
    tokens: array[int] = field(default_factory=lambda: array("q"))
    offsets: array[int] = field(default_factory=lambda: array("q", [0]))
    conversation: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None  # `messages` of a row's prompt, `tools`
    longest_prompt_tokens: int = 0  # of all rows, including dropped ones

    def __len__(self) -> int:
        return len(self.rows)

    def prompt_ids(self, row: int) -> array[int]:
        return self.tokens[self.offsets[row] : self.offsets[row + 1]]

    def add(self, row: DataRow, text: str, tokens: Sequence[int]) -> None:
        self.rows.append(row.values)
        self.prompts.append(text)
        self.wheres.append(row.where)
        self.tokens.extend(tokens)
        self.offsets.append(len(self.tokens))

    def rows_of(
        self, row_B: Column, columns: Sequence[str] | None, *, messages: bool = False
    ) -> dict[str, dict[str, Any]]:
        """Return rows by number, as JSON for a scorer: location of the row, its prompt as text, and its values in
        `columns` (None: all). Values that JSON does not know (dates, decimals, bytes) are text. `messages`: whether
        the conversations that prompts were made from go along, with their tools."""
        conversation = self.conversation if messages else None
        return {
            str(row): {
                "where": self.wheres[row],
                "prompt": self.prompts[row],
                "values": as_json({name: one for name, one in values.items() if columns is None or name in columns}),
                **({} if conversation is None else as_json(conversation(values))),
            }
            for row in sorted(set(row_B.tolist()))
            for values in [self.rows[row]]
        }


def as_json(value: Any) -> Any:
    """Return a value with text for what JSON does not know."""
    return json.loads(json.dumps(value, default=str))


def read_table(
    source: str,
    rows: Iterable[DataRow],
    reader: RowReader,
    codec: TextTokens,
    chats: ChatRenderer | None,
    threads: int = 1,
) -> PromptTable:
    """Build the table, only counting overlong rows; it may be empty. `chats`: the chat template, where prompts go
    through one. Raises DataError on a bad row where the spec refuses them, and ModelError when the template cannot be
    used at all."""
    data = reader.data

    def conversation(values: Mapping[str, Any]) -> dict[str, Any]:
        tools = tools_of(values, reader.tools_column) if reader.chat else None
        return {"messages": messages_of(prompt_of(values, data), data), "tools": tools}

    table = PromptTable(source, conversation=conversation)
    texts_of_rows = _rendered(table, rows, reader, chats, threads)
    while chunk := list(islice(texts_of_rows, ENCODE_ROWS)):
        texts = [text for _, text in chunk]
        encoded = begun(codec, texts) if chats is None else codec.encode(texts, rendered=True)
        for (row, text), ids in zip(chunk, encoded, strict=True):
            if _admit(table, row, ids, data):
                table.add(row, text, ids)
    return table


def _rendered(
    table: PromptTable, rows: Iterable[DataRow], reader: RowReader, chats: ChatRenderer | None, threads: int
) -> Iterator[tuple[DataRow, str]]:
    def written(row: DataRow) -> str:
        text = reader.prompt(row)
        if not isinstance(text, str):
            assert chats is not None, "messages are for a chat template"
            text = rendered(chats, text, tools_of(row.values, reader.tools_column))
        if not text:
            raise BadRow("the prompt is empty")
        return text

    for row, text_of_row in in_order(written, rows, threads if chats is not None else 1):
        try:
            text = text_of_row()
        except BadRow as error:
            table.drop_bad(row, error, reader.data.bad_rows)
        else:
            yield row, text


def uses_chat(data: DataSection, codec: TextCodec) -> bool:
    """Return whether prompts go through the chat template. Raises DataError if the spec needs one that is missing."""
    if data.chat == "always" and not codec.has_chat_template:
        hint = 'use an instruct model, or set data.chat = "never"'
        raise DataError(f'data.chat = "always": the tokenizer of {codec.model_path} has no chat template', hint=hint)
    chat = data.chat != "never" and codec.has_chat_template
    if data.system and not chat:
        hint = "take data.system out, or put its text into data.template"
        raise DataError("data.system has no effect: prompts do not go through a chat template", hint=hint)
    return chat


class RowReader:
    """Takes the prompt out of a row and checks everything that the run reads of it. `needs_answer`: a reward compares
    with `data.answer_column`; `needs_columns`: what else scoring reads of every row; `environments`: of which each
    names one; `tools_column`: what the chat template shows the model."""

    def __init__(
        self,
        data: DataSection,
        needs_answer: bool,
        needs_columns: Sequence[str] = (),
        environments: Sequence[str] = (),
        *,
        chat: bool,
        tools_column: str = "",
    ) -> None:
        self.data, self.chat, self.needs_answer, self.environments = data, chat, needs_answer, environments
        self.tools_column = tools_column
        self.environment_column = data.environment_column if environments else ""
        columns = template_columns(data.template) if data.template else (data.prompt_column,)
        answer = (data.answer_column,) if needs_answer else ()
        named = (self.environment_column,) if self.environment_column else ()
        self.columns = tuple(dict.fromkeys((*columns, *answer, *needs_columns, *named)))
        self.in_template = template_columns(data.template)

    @staticmethod
    def of(config: DataConfig, *, chat: bool) -> RowReader:
        """Return the reader of a run's prompts."""
        assert config.data is not None, "there are no prompts"
        needs = (config.needs_answer, config.needs_columns, config.environments)
        return RowReader(config.data, *needs, chat=chat, tools_column=config.tools_column)

    def prompt(self, row: DataRow) -> str | Messages:
        """Return the row's text, or its messages where prompts go through a chat template. Raises BadRow."""
        if row.problem:
            raise BadRow(row.problem)
        self._check_columns(row.values)
        prompt = prompt_of(row.values, self.data)
        if self.chat:
            return messages_of(prompt, self.data)
        if isinstance(prompt, str):
            return prompt
        why = f"column {self.data.prompt_column!r} is {type(prompt).__name__}, not text"
        raise no_template(why, self.data.chat) if isinstance(prompt, list) else BadRow(why)

    def _check_columns(self, values: Mapping[str, Any]) -> None:
        check_columns(values, self.columns, self.data.answer_column if self.needs_answer else "")
        named = self.environment_column
        if named and str(values[named]) not in self.environments:
            raise BadRow(f"column {named!r} is {values[named]!r:.60}, and must be {' or '.join(self.environments)}")
        for column in self.in_template:
            if isinstance(values[column], dict | list | bytes):
                raise BadRow(f"column {column!r} is {type(values[column]).__name__}, which no template can write")


def check_columns(values: Mapping[str, Any], columns: Sequence[str], answer_column: str) -> None:
    """Raise BadRow where a row lacks a column that is read, or where what completions are compared with is no answer.
    `answer_column`: empty where they are not."""
    for column in columns:
        if values.get(column) is None:
            raise lacking(f"column {column!r} is null" if column in values else f"no column {column!r}", values)
        if problem := not_a_value(values[column]):
            raise BadRow(f"column {column!r} is {problem}")
    if not answer_column:
        return
    answer, column = values[answer_column], f"column {answer_column!r}"
    if not isinstance(answer, str | int | float):
        raise BadRow(f"{column} must be text or a number, not {type(answer).__name__}")
    if problem := blank_answer(answer):
        raise BadRow(f"{column} {problem}")


def prompt_of(values: Mapping[str, Any], data: DataSection) -> Any:
    """Return a row's prompt before any chat template: text, or messages."""
    return render_template(data.template, values) if data.template else values[data.prompt_column]


def messages_of(prompt: Any, data: DataSection) -> Messages:
    """Return what the chat template is given for a prompt. Raises BadRow where it is not one."""
    if isinstance(prompt, str):
        messages: Messages = [{"role": "user", "content": prompt}]
    else:
        messages = [dict(message) for message in checked_messages(prompt, data.prompt_column)]
    if ends_with_answer(messages):
        raise BadRow("the prompt ends with the assistant's own answer, which the model is to write")
    if data.system and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": data.system}, *messages]
    return messages


def _admit(table: PromptTable, row: DataRow, ids: list[int], data: DataSection) -> bool:
    """Count a prompt that is too long or empty; return True if it may be drawn."""
    table.longest_prompt_tokens = max(table.longest_prompt_tokens, len(ids))
    if not ids:
        problem = BadRow("the prompt has no tokens: the tokenizer drops all of its characters")
        table.drop_bad(row, problem, data.bad_rows)
        return False
    if len(ids) <= data.max_prompt_tokens:
        return True
    table.drop_overlong(row, len(ids))
    return False


def refuse_overlong_or_empty(table: PromptTable, data: DataSection) -> None:
    """Raise DataError where the spec refuses prompts for their length, and where none is left."""
    limit = f"data.max_prompt_tokens = {data.max_prompt_tokens}"
    if table.dropped_overlong and data.overlong == "refuse":
        raise DataError(
            f"{table.dropped_overlong} prompts of {table.source} are longer than {limit}; "
            f"the first, {table.first_overlong}, the longest has {table.longest_prompt_tokens}",
            hint='raise data.max_prompt_tokens, or set data.overlong = "drop"',
        )
    if not len(table):
        hint = "check the file, data.prompt_column, data.template and data.max_prompt_tokens"
        raise table.none_left("prompt", limit, hint)
