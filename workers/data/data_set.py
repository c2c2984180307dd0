"""The data of a run: prompts to draw for training, prompts to evaluate on, and the cursor.

Drawing is stateless: draw `d` is a function of the seed and `d` alone, so that a resume needs one number.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backends.hf.tokenizer import TextCodec, pad_token_of
from specs.errors import DataError
from specs.schema.rows import RowSet
from specs.schema.sections import DataSection
from specs.splitmix64 import GOLDEN, mix
from specs.wire.batch import Column
from specs.wire.messages import ROW_COLUMNS
from specs.wire.role_config import DataConfig, RowsConfig
from workers.chat.chat_renderer import ChatRenderer, renderer_of
from workers.data.examples import (
    ExampleReader,
    ExampleTable,
    absent,
    build_examples,
    refuse_absent,
    refuse_nothing,
    refuse_one_label,
    summary,
)
from workers.data.prompts import PromptTable, RowReader, read_table, refuse_overlong_or_empty, uses_chat
from workers.data.row_prompts import refuse_no_prompt, row_prompts
from workers.data.row_source import DataRow, read_rows

EVAL_IDS = 2**40  # first id of evaluation samples; ids of training stay below
EVAL_SPAN = 2**36  # ids of one evaluation, so that no two draw the same random numbers


def scattered(count: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return a permutation of `range(count)`: the order of the splitmix64 hashes (Steele et al. 2014) of the indices.

    Not numpy's shuffle, which may change between versions: a resumed run must draw the same prompts.
    """
    key = np.array([seed, epoch], dtype=np.uint64)
    start = mix(key[:1] * np.uint64(0xD1342543DE82EF95) + mix(key[1:] + GOLDEN) + GOLDEN)
    indices: NDArray[np.uint64] = np.arange(count, dtype=np.uint64)
    return np.argsort(mix(start + indices + GOLDEN), kind="stable").astype(np.int64)


@dataclass
class PromptStream:
    """Prompts of a table in the order in which they are drawn."""

    table: PromptTable
    indices: NDArray[np.int64]  # rows that may be drawn
    seed: int = 0
    shuffle: bool = False
    endless: bool = True  # True: a new epoch follows the last row; False: the data ends there
    first_id: int = 0
    _orders: dict[int, NDArray[np.int64]] = field(default_factory=dict)

    def draw(self, position: int, count: int, group_size: int) -> tuple[dict[str, Column], dict[str, Any]]:
        """Draw `count` prompts from draw number `position` on, each `group_size` times.

        Returns PROMPT_COLUMNS with `length_B`, and the new position with the epoch that it lies in. Draw `d` has
        `group_B` d, and its samples `id_B` d * group_size + i, each the one sample of its rollout:
        `rollout_B` is the same. Nothing is drawn yet (`position_B` 0), and a draw is one prompt (`prefix_B` d).
        """
        end = position + count if self.endless else min(position + count, len(self.indices))
        draws = range(position, max(position, end))
        rows = [self._row(draw) for draw in draws]
        tokens = [np.array(self.table.prompt_ids(row)) for row in rows for _ in range(group_size)]
        group = np.repeat(np.arange(draws.start, draws.stop, dtype=np.int64), group_size)
        member = np.tile(np.arange(group_size, dtype=np.int64), len(rows))
        id_B = group * group_size + member + self.first_id
        columns: dict[str, Column] = {
            "tokens_T": np.concatenate(tokens) if tokens else np.zeros(0, dtype=np.int64),
            "length_B": np.array([len(piece) for piece in tokens], dtype=np.int64),
            "prefix_B": group + self.first_id,
            "position_B": np.zeros_like(id_B),
            "group_B": group + self.first_id,
            "rollout_B": id_B,
            "id_B": id_B,
            "row_B": np.repeat(np.array(rows, dtype=np.int64), group_size),
        }
        return columns, {"position": draws.stop, "epoch": draws.stop // len(self.indices)}

    def _row(self, draw: int) -> int:
        return _row_of(self.indices, draw, self.seed if self.shuffle else None, self._orders)


def _row_of(indices: NDArray[np.int64], draw: int, seed: int | None, orders: dict[int, NDArray[np.int64]]) -> int:
    """Return the row of a draw: each one once an epoch, in an order of its own unless `seed` is None. `orders` keeps
    the epoch's."""
    epoch, place = divmod(draw, len(indices))
    if seed is None:
        return int(indices[place])
    if epoch not in orders:
        orders.clear()
        orders[epoch] = scattered(len(indices), seed, epoch)
    return int(indices[orders[epoch][place]])


@dataclass
class RowStream:
    """Rows of several sources in the order in which they are drawn. An endless stream draws each source as often as its
    weight says, and always the one that is furthest behind; else one source follows the other, and the data ends."""

    tables: Sequence[ExampleTable]
    indices: Sequence[NDArray[np.int64]]  # rows of each that may be drawn
    first_rows: Sequence[int]  # what the first row of each is called
    weights: Sequence[float] = (1.0,)
    seed: int = 0
    shuffle: bool = False
    endless: bool = True
    _at: int = field(default=0, init=False)  # a draw, and how many were drawn of each source before it
    _counts: list[int] = field(default_factory=list, init=False)
    _orders: dict[int, dict[int, NDArray[np.int64]]] = field(default_factory=dict, init=False)  # by source

    def draw(self, position: int, count: int) -> tuple[dict[str, Column], dict[str, Any]]:
        """Return ROW_COLUMNS of `count` draws from number `position` on, and the cursor after them."""
        end = position + count if self.endless else max(position, min(position + count, sum(map(len, self.indices))))
        found: dict[str, list[Column]] = {name: [] for name in (*ROW_COLUMNS, "length_B")}
        places = zip(range(position, end), self._places(position, end), strict=True)
        for source, run in groupby(places, key=lambda place: place[1][0]):
            indices, orders = self.indices[source], self._orders.setdefault(source, {})
            seed = self.seed + source if self.shuffle else None
            draws, rows = zip(*((draw, _row_of(indices, nth, seed, orders)) for draw, (_, nth) in run), strict=True)
            for name, column in self.tables[source].columns(rows, draws, self.first_rows[source]).items():
                found[name].append(column)
        epochs = [count / len(rows) for count, rows in zip(self._counts, self.indices, strict=False)]
        empty = self.tables[0].columns([], [], 0)
        joined = {name: np.concatenate(pieces) if pieces else empty[name] for name, pieces in found.items()}
        return joined, {"position": end, "epoch": max(epochs, default=0.0)}

    def _places(self, position: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield the source of each draw, and how many of that source come before it."""
        if not self.endless:
            starts = np.cumsum([0, *map(len, self.indices)])
            for draw in range(position, end):
                source = int(np.searchsorted(starts, draw, "right")) - 1
                yield source, draw - int(starts[source])
            return
        if position < self._at or not self._counts:
            self._at, self._counts = 0, [0] * len(self.tables)
        shares = [weight / sum(self.weights) for weight in self.weights]
        while self._at < end:
            due = [(self._at + 1) * share - count for share, count in zip(shares, self._counts, strict=True)]
            source = due.index(max(due))
            if self._at >= position:
                yield source, self._counts[source]
            self._at, self._counts[source] = self._at + 1, self._counts[source] + 1


@dataclass(frozen=True)
class RunRows:
    """Rows that a run learns from, and those that it is evaluated on."""

    train: RowStream
    eval: RowStream | None
    name: str = ""  # of the evaluation
    completed: Mapping[str, PromptStream] = field(default_factory=dict)  # by evaluation

    def draw(self, what: str, position: int, count: int) -> tuple[dict[str, Column], dict[str, Any]]:
        """Return ROW_COLUMNS of some draws, and the cursor after them. Of "all" each row that is trained on is drawn
        once, source after source."""
        if what == "train":
            return self.train.draw(position, count)
        if what == "all":
            return replace(self.train, shuffle=False, endless=False).draw(position, count)
        return self.eval.draw(position, count) if self.eval is not None else self.train.draw(position, 0)

    def prompts(self, what: str, name: str = "") -> PromptStream:
        assert name in self.completed, f"the spec has no {what} {name!r}"
        return self.completed[name]

    def report(self) -> dict[str, Any]:
        """Return counts of read and skipped rows, for the user."""
        completed = {name: len(prompts.indices) for name, prompts in self.completed.items()}
        own = [table for table in (self.eval.tables if self.eval else ()) if table is not self.train.tables[0]]
        tables = [*self.train.tables, *own]
        return {
            "rows": sum(map(len, self.train.indices)),
            "eval_rows": completed | ({self.name: sum(map(len, self.eval.indices))} if self.eval else {}),
            "dropped_overlong": sum(table.dropped_overlong for table in tables),
            "dropped_bad": sum(table.dropped_bad for table in tables)
            + sum(prompts.table.dropped_bad for prompts in self.completed.values()),
            "truncated": sum(table.truncated for table in tables),
            "summary": summary(self.train.tables),
            "largest_row": max(table.largest for table in tables),
        }


@dataclass(frozen=True)
class RowSources:
    """Reads the sources of a recipe that learns from rows."""

    config: DataConfig
    rows: RowsConfig
    codec: TextCodec
    chats: ChatRenderer | None
    pad: int | None
    threads: int

    def read(self, source: RowSet, most: int | None) -> Iterator[DataRow]:
        return read_rows(source.path, split=source.split, base=Path(self.config.spec_dir), max_rows=most)

    def reader(self, source: RowSet) -> ExampleReader:
        return ExampleReader(source, self.rows, self.codec, self.chats, self.pad)

    def table(self, source: RowSet, most: int | None, keep: deque[DataRow]) -> ExampleTable:
        """Return the examples of a source. `keep` gets their rows, as many as it has room for."""
        rows = self.read(source, most)
        table = build_examples(rows, self.reader(source), lambda row, _: keep.append(row), self.threads)
        refuse_nothing(table, self.rows)
        return table

    def prompts(self, number: int, source: RowSet, held_out: Sequence[DataRow], *, chat: bool) -> PromptStream:
        """Return the prompts of the evaluation of this number: of its own source, or of the rows that are held out."""
        one = self.config.evals[number]
        source = source.reading(one.data, one.split) if one.data else source
        rows = self.read(source, None) if one.data else held_out
        table = row_prompts(rows, self.reader(source), self.config, chat=chat)
        refuse_no_prompt(table, one.key)
        return _held_out_prompts(table, np.arange(min(one.prompts, len(table)), dtype=np.int64), number)


def open_rows(config: DataConfig, codec: TextCodec, threads: int = 1) -> RunRows:
    """Read and tokenise the rows of `[data]` and `[eval]`. Raises DataError."""
    rows = config.rows
    assert rows is not None, "there are no rows"
    pad = pad_token_of(config.model_path, trust_remote_code=config.trust_remote_code) if rows.of_scores else None
    with renderer_of(codec) if codec.has_chat_template else nullcontext() as chats:
        return _opened_rows(RowSources(config, rows, codec, chats, pad, threads))


def _opened_rows(data: RowSources) -> RunRows:
    config, rows, sources = data.config, data.rows, data.rows.rows.sources
    last = [deque[DataRow](maxlen=0) for _ in sources]  # rows of each source that will be held out
    if config.evals and rows.held_out:
        last[0] = deque(maxlen=rows.held_out)
    tables = [data.table(source, rows.rows.max_rows, keep) for source, keep in zip(sources, last, strict=True)]
    refuse_one_label(tables, rows)
    indices = [np.arange(len(table), dtype=np.int64) for table in tables]
    first_rows = np.cumsum([0, *map(len, tables)]).tolist()
    held = None
    if rows.eval is not None and rows.eval.data:
        last[0] = deque()
        own = data.table(sources[0].reading(rows.eval.data, rows.eval.split), None, last[0])
        held = RowStream([own], [np.arange(min(rows.eval.rows, len(own)))], [first_rows[-1]], endless=False)
    elif rows.eval is not None:
        cut = _rows_to_train_on("eval.rows", rows.eval.rows, len(tables[0]), sources[0].path)
        held = RowStream(tables[:1], [indices[0][cut:]], [0], endless=False)
        indices[0] = indices[0][:cut]
    refuse_absent([*tables, *(held.tables if held is not None else ())], config)
    weights = [source.weight for source in sources]
    train = RowStream(tables, indices, first_rows, weights, config.seed, rows.rows.shuffle)
    chat = any(table.rendered for table in tables)
    completed = {
        one.name: data.prompts(number, sources[0], last[0], chat=chat) for number, one in enumerate(config.evals)
    }
    return RunRows(train, held, rows.eval.name if rows.eval else "", completed)


@dataclass(frozen=True)
class RunData:
    """Training prompts of a run, and those of each evaluation."""

    train: PromptStream
    evals: Mapping[str, PromptStream] = field(default_factory=dict)

    def prompts(self, what: str, name: str = "") -> PromptStream:
        if what == "train":
            return self.train
        assert what == "eval", f"no prompts for {what!r}"
        assert name in self.evals, f"the spec has no evaluation {name!r}"
        return self.evals[name]

    def report(self, answer_column: str) -> dict[str, Any]:
        """Return counts of read and skipped rows and one example, for the user."""
        table, first = self.train.table, int(self.train.indices[0])
        return {
            "rows": len(self.train.indices),
            "eval_rows": {name: len(prompts.indices) for name, prompts in self.evals.items()},
            "dropped_overlong": table.dropped_overlong,
            "first_overlong": table.first_overlong,
            "dropped_bad": table.dropped_bad,
            "first_bad": table.first_bad,
            "longest_prompt_tokens": table.longest_prompt_tokens,
            "prompt_example": table.prompts[first],
            "answer_example": str(table.rows[first].get(answer_column, "")),
        }


def open_data(config: DataConfig, codec: TextCodec, threads: int = 1) -> RunData:
    """Read and tokenise the sources of `[data]` and `[eval]`. Raises DataError."""
    data = config.data
    assert data is not None, "there are no prompts"
    chat = uses_chat(data, codec)
    with renderer_of(codec) if chat else nullcontext() as chats:
        return _opened_data(config, data, codec, chats, threads)


def _opened_data(
    config: DataConfig, data: DataSection, codec: TextCodec, chats: ChatRenderer | None, threads: int
) -> RunData:
    reader = RowReader.of(config, chat=chats is not None)

    def table(source: str, split: str, max_rows: int | None) -> PromptTable:
        rows = read_rows(source, split=split, base=Path(config.spec_dir), max_rows=max_rows)
        found = read_table(source, rows, reader, codec, chats, threads)
        refuse_overlong_or_empty(found, data)
        return found

    train = table(data.train, data.split, data.max_rows)
    cut = len(train)
    evals: dict[str, PromptStream] = {}
    sources: dict[tuple[str, str], PromptTable] = {}  # several sets may be of one source
    for number, one in enumerate(config.evals):
        if not one.data:
            cut = _rows_to_train_on(f"{one.key}.prompts", one.prompts, len(train), data.train)
            held, indices = train, np.arange(cut, len(train), dtype=np.int64)
        else:
            source = (one.data, one.split)
            held = sources[source] = sources.get(source) or table(*source, None)
            indices = np.arange(min(one.prompts, len(held)), dtype=np.int64)
        evals[one.name] = _held_out_prompts(held, indices, number)
    tools, tables = reader.tools_column, (train, *sources.values())
    named = tools not in ("", DataSection.model_fields["tools_column"].default)
    if named and not any(tools in row for one in tables for row in one.rows):
        raise absent(tools, "tools_column", train.rows[0])
    return RunData(PromptStream(train, np.arange(cut, dtype=np.int64), config.seed, data.shuffle), evals)


def _held_out_prompts(table: PromptTable, indices: NDArray[np.int64], number: int) -> PromptStream:
    """Return the prompts of an evaluation, of which `number` come before it."""
    return PromptStream(table, indices, endless=False, first_id=EVAL_IDS + number * EVAL_SPAN)


def _rows_to_train_on(key: str, held_out: int, rows: int, source: str) -> int:
    """Return how many rows of `source` are left to train on. Raises DataError where none are. `key`: how many are
    held out."""
    if rows <= held_out:
        hint = f"lower {key}, or name another source in {key.rpartition('.')[0]}.data"
        raise DataError(f"{key} = {held_out}: {source} has only {rows} usable rows: all would be held out", hint=hint)
    return rows - held_out
