"""The first rows of a run's data, as prompts, and the tokenizer's last token."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from itertools import islice
from pathlib import Path

from backends.hf.tokenizer import TextCodec
from specs.errors import DataError
from specs.schema.sections import is_hub_data
from specs.text import show
from specs.wire.finding import Finding
from specs.wire.role_config import DataConfig
from workers.chat_renderer import renderer_of
from workers.data.prompts import PromptTable, RowReader, read_table, uses_chat
from workers.data.row_source import read_rows

ROWS = 256


def first_tables(config: DataConfig, codec: TextCodec) -> Iterator[tuple[str, PromptTable, bool] | Finding]:
    """Yield (key, table, whether it is the whole source) of the training data where it lies on this machine, or why
    there is none."""
    key, source = "data.train", config.data.train
    if is_hub_data(source):
        return
    rows = read_rows(source, split="", base=Path(config.spec_dir), max_rows=config.data.max_rows)
    try:
        chat = uses_chat(config.data, codec)
        reader = RowReader(config.data, config.needs_answer, config.needs_columns, chat=chat)
        with renderer_of(codec) if chat else nullcontext() as chats:
            table = read_table(source, islice(rows, ROWS), reader, codec, chats)
    except DataError as error:
        yield Finding(key=key, message=error.message, hint=error.hint, value=show(source))
    else:
        yield key, table, next(rows, None) is None
