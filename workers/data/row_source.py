"""Reads the rows of a data source, each with its location. Rows keep all columns for reward functions."""

from __future__ import annotations

import json
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from backends import activity
from specs.builtin_tasks import BUILTIN_TASKS, GYM_PREFIX, PREFIX
from specs.errors import DataError
from specs.json_file import depth_of
from specs.text import LFS, LFS_FETCH, NOT_FETCHED, not_text
from workers.data.gym_rows import gym_rows

PARQUET_BATCH_ROWS = 1024
COUNTED_AT_ONCE = 1 << 20  # bytes, in which lines are counted
FIRST_S = 10.0  # for the first rows, before a run: some of reasoning-gym take seconds each
FEW_ROWS = 512  # are done before other threads, each with a process for the chat template, have begun
MOST_THREADS = 8  # beyond them the interpreter's lock is what rows wait for
_AHEAD = 8  # rows for each thread
MAX_DEPTH = 200  # of a row: pydantic writes no value of more than 254 levels
_OTHERS = {  # how a file begins that is not what its name says: what it is, and the program that mends it
    LFS.encode(): (NOT_FETCHED, LFS_FETCH),
    b"\xff\xfe": ("UTF-16, not UTF-8", "iconv -f UTF-16 -t UTF-8"),
    b"\x1f\x8b": ("compressed", "gunzip"),
    b"\x28\xb5\x2f\xfd": ("compressed", "unzstd"),
    b"\xfd7zXZ": ("compressed", "unxz"),
    b"BZh": ("compressed", "bunzip2"),
    b"PK\3\4": ("compressed", "unzip"),
}
_PER_LINE = "write one JSON object per line, such as `jq -c .[]` does of a list"

R = TypeVar("R")


class BadRow(ValueError):
    """The reason why a row cannot be learned from, or cannot become a prompt. `remedy`: what to do."""

    def __init__(self, why: str, remedy: str = "fix the row") -> None:
        super().__init__(why)
        self.remedy = remedy


def lacking(why: str, values: Mapping[str, Any]) -> BadRow:
    """Return the reason why a row that lacks a column is bad, with the columns that it has."""
    remedy = "fix the row, or let the spec name a column that it has (prompt_column, answer_column, …)"
    return BadRow(f"{why}; the row has {', '.join(map(repr, values)) or 'none'}", remedy)


@dataclass(frozen=True)
class DataRow:
    """One row, or the problem with it. `where` is `file:line`, or a source and the row's number from 1."""

    where: str
    values: dict[str, Any]
    problem: str = ""


@dataclass
class DroppedRows:
    """Count the rows of a source that are left out."""

    source: str
    _: KW_ONLY
    dropped_bad: int = 0
    first_bad: str = ""
    dropped_overlong: int = 0
    first_overlong: str = ""

    def drop_bad(self, row: DataRow, problem: BadRow, bad_rows: str) -> None:
        """Count a bad row. Raises DataError where the key `bad_rows` of the spec refuses them."""
        if bad_rows == "refuse":
            hint = f'{problem.remedy}, or set data.bad_rows = "drop" to leave such rows out'
            raise DataError(f"{row.where}: {problem}", hint=hint)
        self.dropped_bad += 1
        self.first_bad = self.first_bad or f"{row.where}: {problem}"

    def drop_overlong(self, row: DataRow, tokens: int) -> None:
        self.dropped_overlong += 1
        self.first_overlong = self.first_overlong or f"{row.where} has {tokens}"

    def none_left(self, what: str, limit: str, hint: str) -> DataError:
        """Return the error of a source that has lost all. `limit`: of tokens, as the spec says it."""
        why = [f"{self.dropped_overlong} are longer than {limit}"] if self.dropped_overlong else []
        why += [f"{self.dropped_bad} are bad, the first: {self.first_bad}"] if self.dropped_bad else []
        return DataError(f"{self.source}: no {what} is left ({'; '.join(why) or 'it has no rows'})", hint=hint)


def read_rows(source: str, *, split: str, base: Path, max_rows: int | None) -> Iterator[DataRow]:
    """Yield the rows of a `*.jsonl` or `*.parquet` file, a built-in task, a data set of reasoning-gym, or a hub
    dataset `owner/name[:config]`.

    Relative files start at `base`. Raises DataError when the source as a whole cannot be read; a broken row is
    yielded with its problem.
    """

    def expect(rows: int) -> None:
        activity.expect(rows if max_rows is None else min(rows, max_rows))

    if source.startswith(PREFIX):
        rows = _builtin(source)
    elif source.startswith(GYM_PREFIX):
        rows = (DataRow(f"{source} row {number}", values) for number, values in enumerate(gym_rows(source), start=1))
    elif source.endswith(".jsonl"):
        rows = _jsonl(_existing(source, base), expect)
    elif source.endswith(".parquet"):
        rows = _parquet(_existing(source, base), expect)
    elif Path(source).suffix in (".json", ".csv", ".tsv", ".txt", ".gz", ".zst") or (base / source).exists():
        raise DataError(f"data source {source} has an unknown format", hint="use a *.jsonl or *.parquet file")
    else:
        rows = _hub(source, split, expect)
    return _counted(islice(rows, max_rows))


def _counted(rows: Iterator[DataRow]) -> Iterator[DataRow]:
    """Let the driver see how far the reading is: a million rows take minutes."""
    for row in rows:
        activity.count("row")
        yield row


def in_order(
    work: Callable[[DataRow], R], rows: Iterable[DataRow], threads: int
) -> Iterator[tuple[DataRow, Callable[[], R]]]:
    """Yield each row with what returns the result of `work` for it, or raises its error. Where there are many rows,
    several threads work ahead."""
    left, threads = iter(rows), min(threads, MOST_THREADS)
    for row in islice(left, FEW_ROWS) if threads > 1 else left:
        yield row, partial(work, row)
    with ThreadPoolExecutor(threads) as pool:
        ahead = deque[tuple[DataRow, Callable[[], R]]]()
        for row in left:
            ahead.append((row, pool.submit(work, row).result))
            if len(ahead) > _AHEAD * threads:
                yield ahead.popleft()
        yield from ahead


def first_of(rows: Iterator[DataRow], most: int) -> list[DataRow]:
    """Return the first rows, as many as come within `FIRST_S`."""
    found, until = [], time.monotonic() + FIRST_S
    for row in islice(rows, most):
        found.append(row)
        if time.monotonic() > until:
            break
    return found


def _existing(source: str, base: Path) -> Path:
    path = base / Path(source).expanduser()
    if not path.is_file():
        raise DataError(f"data file {path} does not exist", hint="paths are relative to the folder of the spec file")
    with suppress(OSError), open(path, "rb") as file:  # who reads it says why it cannot be opened
        begin = file.read(len(LFS))
        for what, program in (other for mark, other in _OTHERS.items() if begin.startswith(mark)):
            raise DataError(f"data file {path} is {what}", hint=f"use `{program}`")
    return path


def _builtin(source: str) -> Iterator[DataRow]:
    name = source.removeprefix(PREFIX)
    if name not in BUILTIN_TASKS:
        raise DataError(f"there is no built-in task {name!r}", hint=f"the tasks are: {', '.join(BUILTIN_TASKS)}")
    for number, values in enumerate(BUILTIN_TASKS[name](), start=1):
        yield DataRow(f"{source} row {number}", values)


def _jsonl(path: Path, expect: Callable[[int], None]) -> Iterator[DataRow]:
    try:
        with open(path, "rb") as file:
            if activity.verb():  # else the first rows are looked at, not all of them read
                expect(sum(part.count(b"\n") for part in iter(partial(file.read, COUNTED_AT_ONCE), b"")))
                file.seek(0)
            for number, line in enumerate(file, start=1):
                line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
                if line.strip():
                    yield _parse_line(line, f"{path}:{number}")
    except OSError as error:
        raise DataError(f"data file {path} cannot be read: {error.strerror}") from error


def _parse_line(line: bytes, where: str) -> DataRow:
    try:
        values = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return DataRow(where, {}, f"not UTF-8 (byte {error.start})")
    except (ValueError, RecursionError) as error:
        cut = f"; {_PER_LINE}" if line.strip() in (b"{", b"[") else ""
        return DataRow(where, {}, f"not JSON: {error}{cut}")
    if not isinstance(values, dict):
        return DataRow(where, {}, f"not a JSON object but {type(values).__name__}; {_PER_LINE}")
    if line.count(b"[") + line.count(b"{") > MAX_DEPTH and depth_of(values) > MAX_DEPTH:
        return DataRow(where, {}, f"nested more than {MAX_DEPTH} levels deep")
    return DataRow(where, values, not_text(values) if b"\\u" in line else "")


def _parquet(path: Path, expect: Callable[[int], None]) -> Iterator[DataRow]:
    import pyarrow as arrow
    from pyarrow import parquet

    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            twice = [name for name, count in Counter(file.schema_arrow.names).items() if count > 1]
            if twice:
                raise DataError(f"{path} has two columns {twice[0]!r}", hint="rename one of them")
            expect(file.metadata.num_rows)
            maps = "strict" if "map<" in str(file.schema_arrow) else None  # which takes four times as long
            for batch in file.iter_batches(PARQUET_BATCH_ROWS):
                for values in batch.to_pylist(maps_as_pydicts=maps):
                    number += 1
                    yield DataRow(f"{path} row {number}", _as_written(_with_json_keys(values) if maps else values))
    except UnicodeDecodeError as error:
        message = f"{path} holds text that is not UTF-8, in one of the {PARQUET_BATCH_ROWS} rows behind row {number}"
        raise DataError(message, hint="write the file again") from error
    except (arrow.ArrowException, OSError) as error:
        raise DataError(f"{path} is not a readable Parquet file: {error}", hint="write the file again") from error
    except (ValueError, OverflowError, KeyError) as error:  # a date after 9999, two fields or map keys of one name
        message = f"{path}: one of the {PARQUET_BATCH_ROWS} rows behind row {number} holds what Python cannot: {error}"
        raise DataError(message, hint="leave that column out, or write it as text") from error


def _with_json_keys(value: Any) -> Any:
    """Return a value with text for keys of maps that JSON does not know, such as dates."""
    if isinstance(value, dict):
        known = str | int | float
        return {key if isinstance(key, known) else str(key): _with_json_keys(inner) for key, inner in value.items()}
    return [_with_json_keys(inner) for inner in value] if isinstance(value, list) else value


def _as_written(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of a table with messages and tools as they were written: the table gives each the keys of all
    others, with nulls, and a template would write these."""
    return {name: without_nulls(value) if _of_chat(value) else value for name, value in values.items()}


def _of_chat(value: Any) -> bool:
    marks = {"role", "function", "parameters"}
    return isinstance(value, list) and all(isinstance(one, dict) and marks & one.keys() for one in value)


def without_nulls(value: Any) -> Any:
    """Return a value without keys that are null, at any depth: a table gives them to rows that lack them."""
    if isinstance(value, dict):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _hub(source: str, split: str, expect: Callable[[int], None]) -> Iterator[DataRow]:
    number = 0
    try:
        rows = _load_hub(source, split)
        expect(len(rows))
        for number, values in enumerate(rows, start=1):
            yield DataRow(f"{source} [{split}] row {number}", _as_written(values))
    except (ValueError, OverflowError, ImportError, OSError) as error:  # a date after 9999, an image without Pillow
        hint = "install what it asks for, or write the columns that are needed to a *.jsonl file"
        raise DataError(f"{source} [{split}]: a row behind row {number} cannot be read: {error}", hint=hint) from error


def _load_hub(source: str, split: str) -> Any:
    import datasets

    name, _, config = source.partition(":")
    datasets.disable_progress_bars()
    try:
        return datasets.load_dataset(name, config or None, split=split)
    except ValueError as error:  # an unknown split, or a config that must be chosen; the message lists what there is
        hint = "data.split picks the split; `owner/name:config` picks the config"
        raise DataError(f"dataset {source}, split {split!r}: {error}", hint=hint) from error
    except (OSError, datasets.exceptions.DatasetsError, ImportError) as error:
        said = (str(error) or type(error).__name__).splitlines()[0]
        hint = "check the name; without a network `datasets` must have loaded it before, or use a *.jsonl file"
        raise DataError(f"dataset {source} cannot be loaded: {said}", hint=hint) from error
