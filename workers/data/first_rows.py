"""Look at the first rows before a run starts: what is wrong with them, and one of them as it is learned."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from specs.errors import DataError, ModelError
from specs.schema.sections import is_hub_data
from specs.text import show
from specs.wire.finding import Finding
from specs.wire.role_config import DataConfig
from workers.chat_renderer import ChatRenderer
from workers.data.examples import ExampleReader, RowCodec, build_examples, pieces, refuse_nothing
from workers.data.row_source import read_rows

_ROWS = 256
Pieces = list[tuple[str, str]]  # a sequence as text, and of each piece its kind (`pieces`)


def row_findings(config: DataConfig, codec: RowCodec, chats: ChatRenderer | None) -> Iterator[Finding]:
    """Yield what is wrong with the first rows of each source that lies on this machine."""
    for key, reader in _readers(config, codec, chats).items():
        source = reader.source
        try:
            rows = read_rows(source.path, split="", base=Path(config.spec_dir), max_rows=reader.data.max_rows)
            table = build_examples(islice(rows, _ROWS), reader)
            if next(rows, None) is None:  # else others may be better
                refuse_nothing(table, reader.config)
        except DataError as error:
            yield Finding(key=key, message=error.message, hint=error.hint, value=show(source.path))
        except ModelError as error:
            yield Finding(key="model.path", message=error.message, hint=error.hint, value=show(config.model_path))
            return


def first_example(config: DataConfig, codec: RowCodec, chats: ChatRenderer | None) -> list[Pieces]:
    """Return the sequences of the first row that can be learned from; none where there is none at hand."""
    for reader in _readers(config, codec, chats).values():
        rows = read_rows(reader.source.path, split="", base=Path(config.spec_dir), max_rows=_ROWS)
        for row in rows:
            table = build_examples([row], reader)
            if len(table):
                return [pieces(sequence, codec) for sequence in table.example(0)]
    return []


def _readers(config: DataConfig, codec: RowCodec, chats: ChatRenderer | None) -> dict[str, ExampleReader]:
    """Return key → reader of each source on this machine."""
    rows = config.rows
    assert rows is not None, "there are no rows"
    sources = dict(zip(rows.rows.named, rows.rows.sources, strict=True))
    if rows.eval is not None and rows.eval.data:
        first = next(iter(sources.values()))
        sources["eval.data"] = first.model_copy(update={"path": rows.eval.data, "split": rows.eval.split})
    here = {key: source for key, source in sources.items() if not is_hub_data(source.path)}
    return {key: ExampleReader(source, rows, codec, chats) for key, source in here.items()}
