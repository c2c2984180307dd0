"""Prompts to evaluate on, of a recipe that learns from rows: written as its rows are, up to what the model writes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from specs.errors import DataError
from specs.wire.role_config import DataConfig
from workers.data.conversations import tools_of
from workers.data.examples import ExampleReader
from workers.data.prompts import PromptTable, check_columns
from workers.data.row_source import BadRow, DataRow


def row_prompts(rows: Iterable[DataRow], reader: ExampleReader, config: DataConfig, *, chat: bool) -> PromptTable:
    """Read and tokenise the prompts of rows; the table may be empty. `chat`: whether rows that are a prompt of text
    alone go through the chat template. Raises DataError on a bad row where the spec refuses them, and ModelError when
    the template cannot be used at all."""
    answer, most = config.answer_column if config.needs_answer else "", config.max_prompt_tokens
    columns = tuple(filter(None, dict.fromkeys((answer, *config.needs_columns))))

    def conversation(values: Mapping[str, Any]) -> dict[str, Any]:
        asked = reader.asked(values, chat=chat)
        if isinstance(asked, str):
            return {"messages": [{"role": "user", "content": asked}]}
        return {"messages": asked, "tools": tools_of(values, reader.source.tools_column)}

    table = PromptTable(reader.source.path, conversation=conversation)
    for row in rows:
        try:
            text, tokens = reader.prompt(row, chat=chat)
            check_columns(row.values, columns, answer)
            table.longest_prompt_tokens = max(table.longest_prompt_tokens, len(tokens))
            if len(tokens) > most:
                why = f"the prompt has {len(tokens)} tokens, more than the {most} of eval.generate"
                raise BadRow(why, "raise eval.generate.max_prompt_tokens")
        except BadRow as error:
            table.drop_bad(row, error, reader.data.bad_rows)
            continue
        table.add(row, text, tokens)
    return table


def refuse_no_prompt(table: PromptTable, key: str) -> None:
    """Raises DataError where no prompt is left. `key`: of the set, dotted."""
    if not len(table):
        why = (
            f"{table.dropped_bad} rows are bad, the first: {table.first_bad}" if table.dropped_bad else "it has no rows"
        )
        hint = "check its columns, and eval.generate.max_prompt_tokens"
        raise DataError(f"{table.source}: no prompt is left for {key} ({why})", hint=hint)
