"""Tell from the first rows what a run would say of its data: they are read, rendered and tokenised as a run does it."""

from __future__ import annotations

import time
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from pathlib import Path

from specs.builtin_tasks import PREFIX
from specs.errors import DataError, ModelError
from specs.schema.sections import is_hub_data
from specs.text import show
from specs.wire.finding import Finding
from specs.wire.role_config import DataConfig
from workers.chat.chat_renderer import ChatRenderer
from workers.data.prompts import PromptTable, RowReader, messages_of, prompt_of, read_table
from workers.data.row_source import BadRow, DataRow, first_of, read_rows
from workers.joined_text import TextTokens

TRAIN = "data.train"
_ROWS = 256  # that are tokenised
_LATER_ROWS, _LATER_S = 4_000, 0.5  # that are parsed behind these
_UNWRITTEN = 0.5  # share of the characters that a tokenizer may lose before prompts mean nothing
_NOT_COUNTED = "\"'`"  # normalisers write quotes in other ways


def first_findings(config: DataConfig, codec: TextTokens | None, chats: ChatRenderer | None) -> Iterator[Finding]:
    """Yield what is wrong with each source that lies on this machine. `codec`: None where no tokenizer is at hand, so
    that rows are only parsed; `chats`: the chat template, where prompts go through one."""
    data = config.data
    assert data is not None, "there are no prompts"
    sources = {TRAIN: data.train, **{f"{one.key}.data": one.data for one in config.evals if one.data}}
    chat = chats is not None if codec is not None else data.chat != "never"
    reader = RowReader.of(config, chat=chat)
    for key, source in sources.items():
        if is_hub_data(source):
            continue
        most = data.max_rows if key == TRAIN else None
        try:
            rows = read_rows(source, split="", base=Path(config.spec_dir), max_rows=most)
            if codec is not None:
                first, behind = first_of(rows, _ROWS), [*islice(rows, 1)]
                yield from _tokenised(config, key, source, first, reader, codec, chats, whole=not behind)
                rows = chain(behind, rows)
            if not source.startswith(PREFIX):
                _check_later(source, rows, reader)
        except DataError as error:
            yield Finding(key=key, message=error.message, hint=error.hint, value=show(source))
        except ModelError as error:
            yield Finding(key="model.path", message=error.message, hint=error.hint, value=show(config.model_path))
            return


def _check_later(source: str, rows: Iterator[DataRow], reader: RowReader) -> None:
    """Parse more rows, as far as there is time. Raises DataError on a bad one where the spec refuses them."""
    table, until = PromptTable(source), time.monotonic() + _LATER_S
    for row in islice(rows, _LATER_ROWS):
        try:
            reader.prompt(row)
        except BadRow as error:
            table.drop_bad(row, error, reader.data.bad_rows)
        if time.monotonic() > until:
            return


def held_out_of_training(config: DataConfig) -> tuple[str, str, int]:
    """Return the key of the source whose last rows are evaluated on, the key that says how many, and that number."""
    if config.rows is not None:
        return next(iter(config.rows.rows.named)), "eval.rows", config.rows.held_out
    one = next((one for one in config.evals if not one.data), None)
    return TRAIN, f"{one.key}.prompts" if one else "", one.prompts if one else 0


def all_held_out(config: DataConfig, source_key: str, rows: int, usable: int) -> Iterator[Finding]:
    """Refuse to hold out all that can be used of a source's rows."""
    of, key, held = held_out_of_training(config)
    if source_key != of or usable > held:
        return
    message = f"holding them out leaves none of the {rows} rows of {of} to train on"
    message += f": {usable} of them can be used" if usable < rows else ""
    fewer = f"use fewer than {usable}, or " if usable > 1 else ""
    hint = f"{fewer}name another source in {key.rpartition('.')[0]}.data"
    yield Finding(key=key, message=message, hint=hint, value=str(held))


def _tokenised(
    config: DataConfig,
    key: str,
    source: str,
    rows: Sequence[DataRow],
    reader: RowReader,
    codec: TextTokens,
    chats: ChatRenderer | None,
    *,
    whole: bool,
) -> Iterator[Finding]:
    table = read_table(source, rows, reader, codec, chats)
    yield from _lengths(key, table, len(rows), reader, whole=whole)
    if len(table) and whole:
        yield from all_held_out(config, key, len(rows), len(table))
    if len(table):
        written = [(text, table.prompt_ids(row)) for row, text in enumerate(table.prompts)]
        yield from lost_characters(key, source, f"{len(table)} prompts", written, codec)
    if len(table) and chats is not None:
        yield from _left_out(key, table, reader)


def _lengths(key: str, table: PromptTable, rows: int, reader: RowReader, *, whole: bool) -> Iterator[Finding]:
    """Find prompts that are refused for their length, and data of which nothing is left."""
    data, long = reader.data, table.dropped_overlong
    limit = {"key": "data.max_prompt_tokens", "value": str(data.max_prompt_tokens)}
    longest = f"the longest has {table.longest_prompt_tokens} tokens"
    if long and data.overlong == "refuse":
        message = f"{long} of the first {rows} prompts of {table.source} are longer, and data.overlong refuses them"
        yield Finding(**limit, message=f"{message}; {longest}", hint='raise it, or set data.overlong = "drop"')
    elif long and 2 * long >= rows:
        share = str(long) if len(table) else "all"
        message = f"{share} of the first {rows} prompts of {table.source} are longer, and dropped; {longest}"
        refuses = whole and not len(table)
        yield Finding(**limit, message=message, hint="raise it, or shorten the prompts", refuses=refuses)
    elif not len(table) and whole:
        message = f"no prompt is left: {f'all of its {rows} rows are bad' if rows else 'it has no rows'}"
        hint = f"repair the rows, the first: {table.first_bad}" if rows else "write rows into it"
        yield Finding(key=key, message=message, hint=hint, value=show(table.source))


def lost_characters(
    key: str, source: str, first: str, written: Sequence[tuple[str, Sequence[int]]], codec: TextTokens
) -> Iterator[Finding]:
    """Find characters of texts and their tokens that the tokenizer drops or does not know, such as those of another
    language. `first`: what holds them, and how many of it."""
    wanted, lost = Counter[str](), Counter[str]()
    unknown = "" if codec.unknown_id is None else codec.decode([[codec.unknown_id]], special_tokens=True)[0]
    decoded = codec.decode([tokens for _, tokens in written], special_tokens=True)
    for (text, _), kept in zip(written, decoded, strict=True):
        kept = kept.replace(unknown, "") if unknown and unknown not in text else kept
        characters = _characters(text)
        wanted += characters
        lost += characters - _characters(kept)
    if not lost:
        return
    share, shown = lost.total() / wanted.total(), " ".join(one for one, _ in lost.most_common(12))
    message = f"the tokenizer drops or does not know {share:.1%} of the characters of the first {first}: {shown}"
    hint = "use the model that knows these characters, with its own tokenizer, or leave them out"
    yield Finding(key=key, message=message, hint=hint, value=show(source), refuses=share > _UNWRITTEN)


def _characters(text: str) -> Counter[str]:
    """Count what can be seen of a text, whatever a normaliser does to case, accents, widths and spaces."""
    plain = unicodedata.normalize("NFKD", text).casefold()
    return Counter(
        one
        for one in plain
        if one.isprintable() and not (one.isspace() or unicodedata.combining(one) or one in _NOT_COUNTED)
    )


def _left_out(key: str, table: PromptTable, reader: RowReader) -> Iterator[Finding]:
    """Find roles whose text is in none of the prompts."""
    data, found = reader.data, dict[str, list[bool]]()
    for row, prompt in zip(table.rows, table.prompts, strict=True):
        for message in messages_of(prompt_of(row, data), data):
            content = message.get("content")  # of a tool anything
            parts = content if isinstance(content, list) else [content]
            texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
            words = " ".join(text for text in texts if isinstance(text, str)).casefold().split()
            if words and message["role"] != "assistant":
                found.setdefault(message["role"], []).append(max(words, key=len) in prompt.casefold())
    absent = [role for role, seen in found.items() if not any(seen)]
    if "user" in absent:
        said = f"the chat template leaves out what users say: a prompt is {show(table.prompts[0])}"
        yield Finding(key="model.path", message=said, hint="repair it, or use the model's own")
    elif absent:
        asked = absent[0] == "system" and bool(data.system)
        where = {"key": "data.system", "value": show(data.system)} if asked else {"key": key}
        said = f"has no effect: the chat template leaves {absent[0]} messages out"
        hint = "put its text into the user's message, such as with data.template"
        yield Finding(**where, message=said, hint=hint, refuses=asked)
