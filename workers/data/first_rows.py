"""Look at the first rows before a run starts: what is wrong with them, and one of them as it is learned."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from specs.errors import DataError, ModelError
from specs.schema.sections import is_hub_data
from specs.text import show
from specs.wire.finding import Finding
from specs.wire.role_config import DataConfig
from workers.chat.chat_renderer import ChatRenderer
from workers.data.examples import (
    ExampleReader,
    ExampleTable,
    Learned,
    build_examples,
    pieces,
    refuse_absent,
    refuse_nothing,
    refuse_one_label,
    summary,
)
from workers.data.first_prompts import all_held_out, lost_characters
from workers.data.row_prompts import refuse_no_prompt, row_prompts
from workers.data.row_source import DataRow, first_of, read_rows
from workers.data.tokenizer_file import TokenizerFile

_ROWS = 256
_EVAL = "eval.data"
Pieces = list[tuple[str, str]]  # a sequence as text, and of each piece its kind (`pieces`)


@dataclass(frozen=True)
class FirstRows:
    """The first row that can be learned from, sequence by sequence, and a line on the first rows of its source."""

    example: Sequence[Pieces] = ()
    summary: str = ""


def row_findings(
    config: DataConfig,
    codec: TokenizerFile,
    chats: ChatRenderer | None,
    fits: Callable[[int], None] = lambda largest: None,
) -> Iterator[Finding]:
    """Yield what is wrong with the first rows of each source that lies on this machine. `fits` raises DataError for a
    row of too many tokens."""
    try:
        yield from _source_findings(config, _readers(config, codec, chats), fits)
    except ModelError as error:
        yield Finding(key="model.path", message=error.message, hint=error.hint, value=show(config.model_path))


def _source_findings(
    config: DataConfig, readers: Mapping[str, ExampleReader], fits: Callable[[int], None]
) -> Iterator[Finding]:
    whole: list[ExampleTable] = []  # of the first readers
    learned: list[Learned] = []  # of the reader's rows
    chat = False
    for key, reader in readers.items():
        path, ended = show(reader.source.path), True
        try:
            rows = _rows(config, reader)
            chunk = first_of(rows, _ROWS)
            learned.clear()
            table = build_examples(chunk, reader, lambda _, whole: learned.extend(whole.sequences))
            fits(table.largest)
            chat = chat or (key != _EVAL and table.rendered)
            ended = next(rows, None) is None
            refuse_nothing(table, reader.config, "row" if ended else f"row of the first {_ROWS}")
            written = [(each.text, each.tokens) for each in learned]
            yield from lost_characters(key, reader.source.path, f"{len(table)} rows", written, reader.codec)
            if not ended:
                continue
            yield from all_held_out(config, key, len(chunk), len(table))
            whole.append(table)
            if key != _EVAL and len(whole) == len(reader.data.sources):
                refuse_one_label(whole, reader.config)
            if len(whole) == len(reader.data.sources) + bool(reader.config.eval and reader.config.eval.data):
                refuse_absent(whole, config)
        except DataError as error:  # rows that nobody has read may be better
            yield Finding(key=key, message=error.message, hint=error.hint, value=path, refuses=ended)
    yield from _prompt_findings(config, readers, chat)


def _prompt_findings(config: DataConfig, readers: Mapping[str, ExampleReader], chat: bool) -> Iterator[Finding]:
    """Yield what is wrong with the prompts that are completed to evaluate the model. `chat`: whether rows that are
    trained on go through the chat template."""
    held_out = readers.get(_EVAL) or next(iter(readers.values()), None)
    for one in config.evals:
        if held_out is None or is_hub_data(one.data):
            continue
        reader = held_out
        if one.data:
            source = held_out.source.reading(one.data, one.split)
            reader = ExampleReader(source, held_out.config, held_out.codec, held_out.chats)
        try:
            rows = _rows(config, reader)
            table = row_prompts(first_of(rows, _ROWS), reader, config, chat=chat)
            if next(rows, None) is None:
                refuse_no_prompt(table, one.key)
        except DataError as error:
            key = f"{one.key}.data"  # other rows may do where those that are held out do not
            hint = error.hint if one.data else f"name rows with prompts, or {error.hint}"
            yield Finding(key=key, message=error.message, hint=hint, value=show(reader.source.path))


def first_rows(config: DataConfig, codec: TokenizerFile, chats: ChatRenderer | None) -> FirstRows:
    """Return what the first rows teach, of the first source that lies here and has one to learn from."""
    for reader in _readers(config, codec, chats).values():
        table = build_examples(first_of(_rows(config, reader), _ROWS), reader)
        if len(table):
            dropped = {"too long": table.dropped_overlong, "bad": table.dropped_bad, "truncated": table.truncated}
            line = "; ".join([summary([table]), *(f"{count} {why}" for why, count in dropped.items() if count)])
            example = [pieces(sequence, codec) for sequence in table.example(0)]
            return FirstRows(example, f"first rows ({len(table)}): {line}")
    return FirstRows()


def _rows(config: DataConfig, reader: ExampleReader) -> Iterator[DataRow]:
    most = reader.data.max_rows if reader.source in reader.data.sources else None  # those of an evaluation are all read
    return read_rows(reader.source.path, split="", base=Path(config.spec_dir), max_rows=most)


def _readers(config: DataConfig, codec: TokenizerFile, chats: ChatRenderer | None) -> dict[str, ExampleReader]:
    """Return key → reader of each source on this machine."""
    rows = config.rows
    assert rows is not None, "there are no rows"
    sources = dict(zip(rows.rows.named, rows.rows.sources, strict=True))
    if rows.eval is not None and rows.eval.data:
        first = next(iter(sources.values()))
        sources[_EVAL] = first.reading(rows.eval.data, rows.eval.split)
    here = {key: source for key, source in sources.items() if not is_hub_data(source.path)}
    pad = codec.pad_id if rows.of_scores else None
    return {key: ExampleReader(source, rows, codec, chats, pad) for key, source in here.items()}
