"""Whether the data that a spec names can be read: the file is there, its first rows parse and have the columns."""

from __future__ import annotations

import codecs
import json
import os
import re
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from specs.builtin_tasks import BUILTIN_TASKS
from specs.errors import Problem
from specs.explain import show
from specs.keys import closest
from specs.model_files import hub_snapshot, looks_like_hub_id, offline
from specs.schema import ExactMatch, MathVerify, Spec
from specs.templates import template_columns

DATA_SUFFIXES = (".jsonl", ".parquet")
ROWS_LOOKED_AT = 50


def is_hub_data(source: str) -> bool:
    """Whether a data source is a hub id rather than a file or a built-in task."""
    return bool(source) and not source.startswith("builtin:") and not _is_data_path(source)


def _is_data_path(source: str) -> bool:
    return bool(Path(source).suffix in (*DATA_SUFFIXES, ".json", ".csv", ".txt")) or source.startswith((".", "/", "~"))


def check_data(spec: Spec, spec_dir: Path) -> tuple[list[Problem], list[Problem]]:
    """Errors and warnings about the data files that a spec names."""
    errors: list[Problem] = []
    warnings: list[Problem] = []
    sources = [("data.train", spec.data.train)]
    if spec.eval is not None and spec.eval.data:
        sources.append(("eval.data", spec.eval.data))
    for key, source in sources:
        found = _source(key, source, spec, spec_dir)
        errors += found[0]
        warnings += found[1]
    return errors or _all_held_out(spec, spec_dir), warnings


def _source(key: str, source: str, spec: Spec, spec_dir: Path) -> tuple[list[Problem], list[Problem]]:
    value = show(source)
    if source.startswith("builtin:"):
        return _builtin(key, source, spec), []
    file = spec_dir / Path(source).expanduser()
    if "://" in source:
        return [_address(key, source)], []
    if file.is_symlink() and not file.exists():
        hint = "repair the link, or name the file itself"
        return [Problem(key, f"a link to {os.readlink(file)}, which is not there", hint, value)], []
    if file.is_dir():
        return [Problem(key, "a folder, not a file", "name one file; rows of several can be joined", value)], []
    if is_hub_data(source):
        if file.name.endswith((".gz", ".zst", ".bz2", ".xz", ".zip")) and file.exists():
            return [Problem(key, "compressed", "unpack it (gunzip, unzstd, …) and name what comes out", value)], []
        if file.exists():
            hint = "rename it, or convert it to JSON Lines"
            return [Problem(key, f"data files end in {' or '.join(DATA_SUFFIXES)}", hint, value)], []
        hub_id = source.partition(":")[0]
        if not looks_like_hub_id(hub_id, spec_dir):
            hint = "a relative path starts at the spec file's folder"
            return [Problem(key, f"no such file ({os.path.abspath(file)})", hint, value)], []
        if hub_snapshot(hub_id, "datasets") is not None:
            return [], []
        if offline():
            return [
                Problem(key, "not in the Hugging Face cache while HF_HUB_OFFLINE is set", "check the name", value)
            ], []
        hint = "check the name, and that this machine reaches the hub"
        if hub_id in BUILTIN_TASKS:
            hint = f'did you mean "builtin:{hub_id}"?'
        return [], [Problem(key, "will be downloaded from the hub when the run starts", hint, value)]
    if file.suffix not in DATA_SUFFIXES:
        hint = "write one JSON object per line into a file that ends in .jsonl"
        return [Problem(key, f"data files end in {' or '.join(DATA_SUFFIXES)}", hint, value)], []
    if not file.is_file():
        hint = _where_it_may_be(file)
        return [Problem(key, f"no such file ({os.path.abspath(file)})", hint, value)], []
    try:
        message = _jsonl(file, spec) if file.suffix == ".jsonl" else _parquet(file, spec)
    except OSError as error:
        message = f"cannot be read: {error.strerror or error}"
    if not message:
        return [], []
    problem = Problem(key, message, _row_hint(message) or "write the file anew", value)
    bad_row = ":" in message.split(" ")[0]
    return ([], [problem]) if bad_row and spec.data.bad_rows == "drop" else ([problem], [])


def _address(key: str, source: str) -> Problem:
    """An address of the web, or of a store, where a file or a hub id is wanted."""
    found = re.fullmatch(r"(?:https?://huggingface\.co/datasets/|hf://(?:datasets/)?)([\w.-]+/[\w.-]+).*", source)
    hint = f'write "{found[1]}"' if found else "download it, and name the file"
    return Problem(key, "an address, not a file or a hub id", hint, show(source))


def _where_it_may_be(file: Path) -> str:
    if "*" in file.name:
        return "name one file; rows of several can be joined"
    there = (
        [other.name for other in file.parent.glob("*") if other.suffix in DATA_SUFFIXES] if file.parent.is_dir() else []
    )
    near = closest(file.name, there)
    return f"did you mean {near}?" if near else "a relative path starts at the spec file's folder"


def _row_hint(message: str) -> str:
    if "has no column" in message:
        return "name the columns with data.prompt_column, data.answer_column or data.template"
    if "is empty" in message:
        return "write one JSON object per line into it"
    if "compressed" in message:
        return "unpack it (gunzip) and name what comes out"
    if "begins a list" in message or "goes on" in message:
        return "write one JSON object per line, such as `jq -c .[]` does of a list"
    if "; an answer is" in message or "; a prompt is" in message:
        return "name the column that holds it, or make it text in the file"
    if 'data.chat = "never"' in message:
        return 'set data.chat = "auto", or write the prompt as text'
    if "not UTF-8" in message:
        return "save it as UTF-8"
    return 'repair the row, or set data.bad_rows = "drop"' if ":" in message.split(" ")[0] else ""


def _builtin(key: str, source: str, spec: Spec) -> list[Problem]:
    name = source.removeprefix("builtin:")
    if name not in BUILTIN_TASKS:
        near = closest(name, list(BUILTIN_TASKS))
        hint = f'did you mean "builtin:{near}"?' if near else f'write "builtin:{next(iter(BUILTIN_TASKS))}"'
        return [Problem(key, f"no such built-in task; known: {', '.join(BUILTIN_TASKS)}", hint, show(source))]
    message = _lacks(next(BUILTIN_TASKS[name]()), needed_columns(spec))
    return [Problem(key, f"{name} {message}", _row_hint(message), show(source))] if message else []


def needed_columns(spec: Spec) -> list[str]:
    """Columns that the prompt and the built-in rewards read."""
    data = spec.data
    columns = [*template_columns(data.template)] if data.template else [data.prompt_column]
    if any(isinstance(term, ExactMatch | MathVerify) for term in spec.reward.terms):
        columns.append(data.answer_column)
    return list(dict.fromkeys(columns))


def _lacks(has: Iterable[str], needs: list[str]) -> str:
    missing = [name for name in needs if name not in set(has)]
    return f"has no column {missing[0]!r}; it has {', '.join(map(repr, has)) or 'none'}" if missing else ""


def _unusable(row: Mapping[str, Any], spec: Spec) -> str:
    """What is wrong with the values of a row that has all columns, or ""."""
    data = spec.data
    for name in needed_columns(spec):
        value = row[name]
        if value is None:
            return f"column {name!r} is null"
        if name == data.prompt_column and not data.template and not isinstance(value, str | list):
            return f"column {name!r} is {_type(value)}; a prompt is text or a list of messages"
        if name == data.answer_column and not isinstance(value, str | int | float):
            return f"column {name!r} is {_type(value)}; an answer is text or a number"
    prompt = None if data.template else row[data.prompt_column]
    if prompt == "" and data.chat == "never":
        return f"column {data.prompt_column!r} is empty"
    if isinstance(prompt, list) and data.chat == "never":
        return f'column {data.prompt_column!r} is a list of messages, and data.chat = "never"'
    if isinstance(prompt, list) and not (prompt and all(map(_is_message, prompt))):
        return f"column {data.prompt_column!r} is a list, but not of messages with role and content"
    return ""


def _is_message(one: Any) -> bool:
    return isinstance(one, Mapping) and isinstance(one.get("role"), str) and "content" in one


def _all_held_out(spec: Spec, spec_dir: Path) -> list[Problem]:
    """`eval.prompts` that leaves no row of `data.train` to train on. Reads no further than it must."""
    held, source = spec.eval, spec.data.train
    if held is None or held.data:
        return []
    file = spec_dir / Path(source).expanduser()
    if (task := BUILTIN_TASKS.get(source.removeprefix("builtin:"))) is not None:
        rows = sum(1 for _ in islice(task(), held.prompts + 1))
    elif file.suffix == ".jsonl":
        with file.open("rb") as stream:
            rows = sum(1 for _ in islice((line for line in stream if line.strip()), held.prompts + 1))
    elif file.suffix == ".parquet":
        import pyarrow.parquet as parquet

        rows = parquet.read_metadata(file).num_rows
    else:
        return []
    if rows > held.prompts:
        return []
    message = f"holding them out leaves none of the {rows} rows of data.train to train on"
    hint = f"use fewer than {rows}, or name another source in eval.data"
    return [Problem("eval.prompts", message, hint, str(held.prompts))]


def _jsonl(file: Path, spec: Spec) -> str:
    """What is wrong with the first rows, or "". A message about a row starts with `name:line`."""
    needs, rows = needed_columns(spec), 0
    with file.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            if rows == ROWS_LOOKED_AT:
                break
            if not line.strip():
                continue
            rows += 1
            where = f"{file.name}:{number}"
            row, wrong = _parsed(line.removeprefix(codecs.BOM_UTF8) if number == 1 else line, first=number == 1)
            if row is None:
                return f"{where} {wrong}"
            if message := _lacks(row, needs) or _unusable(row, spec):
                return f"{where} {message}"
    return "" if rows else "the file is empty"


def _parsed(line: bytes, *, first: bool) -> tuple[dict[str, Any] | None, str]:
    """The object that a line holds, or what it is instead."""
    if line.startswith(b"\x1f\x8b"):
        return None, "is compressed (gzip)"
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return None, f"is not UTF-8 (byte {error.start} of the line)"
    except (ValueError, RecursionError) as error:
        if first and line.strip() in (b"{", b"["):
            return None, "begins a list or an object that goes on in the next line"
        place = f" (character {error.pos + 1})" if isinstance(error, json.JSONDecodeError) else ""
        return None, f"is not JSON{place}: {line.decode('utf-8').strip()[:60]}"
    if isinstance(row, list) and row and isinstance(row[0], dict):
        return None, "begins a list of objects"
    return (row, "") if isinstance(row, dict) else (None, f"is not a JSON object but {_type(row)}")


def _type(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number"}
    return "null" if value is None else names.get(type(value), type(value).__name__)


def _parquet(file: Path, spec: Spec) -> str:
    with file.open("rb") as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(0)
        head = stream.read(4)
        stream.seek(max(0, size - 4))
        if size < 12 or head != b"PAR1" or stream.read(4) != b"PAR1":
            return "not a Parquet file, or cut short"
    import pyarrow.parquet as parquet  # costs a quarter second: only where there is such a file

    try:
        found = parquet.ParquetFile(file)
    except (OSError, ValueError):  # pyarrow's own errors are kinds of these
        return "not a Parquet file, or damaged"
    if found.metadata.num_rows == 0:
        return "the file is empty"
    if message := _lacks(found.schema_arrow.names, needed_columns(spec)):
        return message
    first = next(found.iter_batches(ROWS_LOOKED_AT, columns=needed_columns(spec)))
    for number, row in enumerate(first.to_pylist(), 1):
        if message := _unusable(row, spec):
            return f"{file.name}:{number} {message}"
    return ""
