"""Turns rows into examples: the tokens of a sequence, or of two, and which of these are learned."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import TYPE_CHECKING, Any

import numpy as np

from specs.errors import DataError
from specs.schema.rows import RowSet
from specs.wire.role_config import RowsConfig
from workers.data.prompts import BadRow
from workers.data.row_source import DataRow

if TYPE_CHECKING:
    from backends.hf.tokenizer import TextCodec
    from specs.wire.batch import Column


@dataclass(frozen=True)
class Learned:
    """Tokens, and how many of the first of them are not learned."""

    tokens: list[int]
    mask: list[int]


@dataclass(frozen=True)
class Example:
    """Hold what a row teaches: one sequence, or a chosen one and then a rejected one."""

    sequences: Sequence[Learned]
    chosen: Sequence[int]  # of each sequence, 1 or 0
    margin: float = 0.0


@dataclass
class ExampleTable:
    """Examples that can be drawn, sequence after sequence; example `i` has those from `first[i]` to `first[i + 1]`."""

    source: str
    first: array[int] = field(default_factory=lambda: array("q", [0]))
    offsets: array[int] = field(default_factory=lambda: array("q", [0]))
    tokens: array[int] = field(default_factory=lambda: array("q"))
    masks: array[int] = field(default_factory=lambda: array("B"))
    chosen: array[int] = field(default_factory=lambda: array("B"))
    margins: array[float] = field(default_factory=lambda: array("f"))
    dropped_bad: int = 0
    first_bad: str = ""
    dropped_overlong: int = 0
    first_overlong: str = ""

    def __len__(self) -> int:
        return len(self.first) - 1

    def add(self, example: Example) -> None:
        for sequence, chosen in zip(example.sequences, example.chosen, strict=True):
            self.tokens.extend(sequence.tokens)
            self.masks.extend(sequence.mask)
            self.offsets.append(len(self.tokens))
            self.chosen.append(chosen)
            self.margins.append(example.margin)
        self.first.append(len(self.chosen))

    def columns(self, rows: Sequence[int], draws: Sequence[int], first_row: int) -> dict[str, Column]:
        """Return ROW_COLUMNS with `length_B` of some examples. `draws`: the number of each; `first_row`: what the
        table's first row is called."""
        spans = [(self.first[row], self.first[row + 1]) for row in rows]
        members = [sequence for begin, end in spans for sequence in range(begin, end)]
        sizes = [end - begin for begin, end in spans]
        pieces = [(self.offsets[sequence], self.offsets[sequence + 1]) for sequence in members]
        tokens, masks = np.frombuffer(self.tokens, np.int64), np.frombuffer(self.masks, np.uint8)
        chosen, margins = np.frombuffer(self.chosen, np.uint8), np.frombuffer(self.margins, np.float32)
        return {
            "tokens_T": _joined([tokens[begin:end] for begin, end in pieces], np.int64),
            "loss_mask_T": _joined([masks[begin:end] for begin, end in pieces], np.uint8),
            "length_B": np.array([end - begin for begin, end in pieces], dtype=np.int64),
            "unit_B": np.repeat(np.array(draws, dtype=np.int64), sizes),
            "chosen_B": chosen[members],
            "row_B": np.repeat(np.array(rows, dtype=np.int64) + first_row, sizes),
            "margin_B": margins[members],
        }


def _joined(pieces: Sequence[Column], dtype: Any) -> Column:
    return np.concatenate(pieces) if pieces else np.zeros(0, dtype=dtype)


def build_examples(rows: Iterable[DataRow], source: RowSet, config: RowsConfig, codec: TextCodec) -> ExampleTable:
    """Read and tokenise all rows of a source. Raises DataError on a bad or overlong row where the spec refuses them,
    and when no row is left."""
    table, data = ExampleTable(source.path), config.rows
    for row in rows:
        try:
            example = _example(row, source, config, codec)
        except BadRow as error:
            if data.bad_rows == "refuse":
                hint = 'fix the row, or set data.bad_rows = "drop" to leave such rows out'
                raise DataError(f"{row.where}: {error}", hint=hint) from None
            table.dropped_bad += 1
            table.first_bad = table.first_bad or f"{row.where}: {error}"
            continue
        longest = max(len(sequence.tokens) for sequence in example.sequences)
        if longest <= data.max_tokens:
            table.add(example)
            continue
        table.dropped_overlong += 1
        table.first_overlong = table.first_overlong or f"{row.where} has {longest}"
    if not len(table):
        raise DataError(f"{source.path}: no row is left", hint="check the file, its columns and data.max_tokens")
    return table


def _example(row: DataRow, source: RowSet, config: RowsConfig, codec: TextCodec) -> Example:
    if row.problem:
        raise BadRow(row.problem)
    values = row.values
    if config.unit == "pair":
        prompt, margin = _text(values, source.prompt_column), values.get(source.margin_column, 0.0)
        texts = [_text(values, source.chosen_column), _text(values, source.rejected_column)]
        if texts[0] == texts[1]:
            raise BadRow(f"columns {source.chosen_column!r} and {source.rejected_column!r} are equal")
        if isinstance(margin, bool) or not isinstance(margin, int | float) or not isfinite(margin):
            raise BadRow(f"column {source.margin_column!r} is no number")
        return Example([_completion(prompt, text, codec) for text in texts], (1, 0), float(margin))
    label = 1
    if config.unit == "sequence":
        found = values.get(source.label_column)
        if not isinstance(found, bool):
            raise BadRow(f"column {source.label_column!r} must be true or false")
        label = int(found)
    prompt, completion = _text(values, source.prompt_column), _text(values, source.completion_column)
    return Example([_completion(prompt, completion, codec)], (label,))


def _text(values: Mapping[str, Any], column: str) -> str:
    value = values.get(column)
    if not isinstance(value, str):
        raise BadRow(f"no text in column {column!r}; the row has {', '.join(map(repr, values)) or 'none'}")
    if not value:
        raise BadRow(f"column {column!r} is empty")
    return value


def _completion(prompt: str, completion: str, codec: TextCodec) -> Learned:
    """Join them as they stand; the end of sequence follows once, and is learned."""
    (before,) = codec.encode([prompt], rendered=False)
    (after,) = codec.encode([completion], rendered=True)
    end = codec.tokenizer.eos_token_id
    after = after if end is None or after[-1:] == [end] else [*after, end]
    return Learned([*before, *after], [0] * len(before) + [1] * len(after))
