"""A spec's text with `--set` in it: comments and layout stay, lines of changed keys are written anew."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tomli

from specs.load.dotted_keys import value_at
from specs.load.overrides import apply_overrides, fill_engine_kinds
from specs.load.toml_text import bare, dumped, written

Path = tuple[str | int, ...]
_MISSING = object()
_KEY = r"""(?:"[^"\n]*"|'[^'\n]*'|[A-Za-z0-9_-]+)"""
_DOTTED = re.compile(rf"\s*({_KEY}(?:\s*\.\s*{_KEY})*)\s*")
_HEADER = re.compile(rf"\s*(\[\[?)\s*({_KEY}(?:\s*\.\s*{_KEY})*)\s*\]\]?")
_LOST = "# Written by rlctl: --set changed what comments and layout could not be kept around.\n\n"


def as_run(text: str, overrides: Sequence[str]) -> str:
    """The TOML text of the spec that `text` and valid `overrides` make together."""
    before, wanted = tomli.loads(text), tomli.loads(text)
    apply_overrides(wanted, overrides)
    fill_engine_kinds(before)
    if wanted == before:
        return text
    for edited in (_edited(text, before, wanted), _LOST + dumped(wanted)):
        try:
            read = tomli.loads(edited)
        except tomli.TOMLDecodeError:
            continue
        fill_engine_kinds(read)
        if read == wanted:
            return edited
    raise AssertionError("a spec that was read can be written")


@dataclass
class _Piece:
    """Lines of the text: a header (`table`), a key with its value, or what stands between."""

    text: str
    path: Path | None = None  # of the table or the key
    is_header: bool = False


def _edited(text: str, before: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    pieces = list(_pieces(text))
    keys = {piece.path for piece in pieces if piece.path is not None and not piece.is_header}
    tables = {piece.path for piece in pieces if piece.path is not None and piece.is_header}
    for piece in pieces:
        if piece.path is None or piece.is_header:
            continue
        old, new = value_at(before, piece.path, _MISSING), value_at(wanted, piece.path, _MISSING)
        if new is _MISSING:
            piece.text = "".join(f"# {line}" for line in piece.text.splitlines(keepends=True))
        elif new != old:
            piece.text = _rewritten(piece.text, new)
    for table, name, value in _added(wanted, (), keys, tables):
        # An engine's kind may be filled in, and need not be written.
        if value_at(before, (*table, name), _MISSING) != value:
            _insert(pieces, table, f"{bare(name)} = {written(value)}\n")
    return "".join(piece.text for piece in pieces)


def _pieces(text: str) -> Iterator[_Piece]:
    lines = text.splitlines(keepends=True)
    table: Path = ()
    counts: dict[Path, int] = {}
    index = 0
    while index < len(lines):
        line = lines[index]
        if header := _HEADER.match(line):
            table = _placed(_parts(header[2]), counts, adds=header[1] == "[[")
            yield _Piece(line, table, is_header=True)
            index += 1
            continue
        key = _DOTTED.match(line)
        if not key or line.lstrip().startswith("#"):
            yield _Piece(line)
            index += 1
            continue
        end = next((end for end in range(index + 1, len(lines) + 1) if _reads("".join(lines[index:end]))), len(lines))
        yield _Piece("".join(lines[index:end]), (*table, *_parts(key[1])))
        index = end


def _parts(dotted: str) -> list[str]:
    return [part.strip("\"'") for part in re.findall(_KEY, dotted)]


def _placed(parts: Sequence[str], counts: dict[Path, int], *, adds: bool) -> Path:
    """The path of a header's table, with the number of the entry wherever a list of tables is meant."""
    path: Path = ()
    for depth, part in enumerate(parts):
        path = (*path, part)
        if adds and depth == len(parts) - 1:
            counts[path] = counts.get(path, -1) + 1
        if path in counts:
            path = (*path, counts[path])
    return path


def _reads(text: str) -> bool:
    try:
        tomli.loads(text)
    except tomli.TOMLDecodeError:
        return False
    return True


def _rewritten(statement: str, value: Any) -> str:
    """The key with another value; a comment behind it stays."""
    head, _, _ = statement.partition("=")
    comment = ""
    for place in (match.start() for match in re.finditer("#", statement)):
        if _reads(statement[:place]):
            comment = "  " + statement[place:].splitlines()[0]
            break
    ending = "\n" if statement.endswith("\n") else ""
    return f"{head}= {written(value)}{comment}{ending}"


def _added(
    wanted: Mapping[str, Any], table: Path, keys: set[Path], tables: set[Path]
) -> Iterator[tuple[Path, str, Any]]:
    """What no line of the text says: (table, key, value)."""
    for name, value in wanted.items():
        path = (*table, name)
        if path in keys:
            continue
        below = [other for other in keys | tables if other[: len(path)] == path]
        if not below and (table or not isinstance(value, Mapping)):
            yield table, name, value
        elif isinstance(value, Mapping):
            yield from _added(value, path, keys, tables)
        elif isinstance(value, list):
            for index, entry in enumerate(value):
                if isinstance(entry, Mapping):
                    yield from _added(entry, (*path, index), keys, tables)


def _insert(pieces: list[_Piece], table: Path, line: str) -> None:
    """Behind the last key that stands below the table's header; a table without one gets it at the end."""
    place = -1 if table else 0
    inside = not table
    for index, piece in enumerate(pieces):
        if piece.is_header:
            inside = piece.path == table
            place = index + 1 if inside else place
        elif inside and piece.path is not None:
            place = index + 1
    if place >= 0:
        if place and not pieces[place - 1].text.endswith("\n"):
            pieces[place - 1].text += "\n"
        pieces.insert(place, _Piece(line, (*table, "")))
        return
    pieces.append(_Piece(f"\n[{'.'.join(bare(str(part)) for part in table)}]\n", table, is_header=True))
    pieces.append(_Piece(line, (*table, "")))
