"""`--set TABLE.kind=OTHER`: what becomes of the keys that the file wrote for the kind that it named.

A kind is a named setting: it has keys, and defaults of its own. So with another kind a key of the file stays where that
kind has it with the same default; the others go, and `Dropped` says which. What `--set` itself sets always stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import PydanticCustomError

from specs.load.keys import Path, chosen_tables, dotted, tables_at, value_at
from specs.schema.table import Table
from specs.text import show


@dataclass(frozen=True)
class Dropped:
    """Keys of a table that were written for another kind."""

    table: str  # dotted
    kinds: tuple[str, str]  # the file's, and that of --set
    keys: dict[str, Any]

    def __str__(self) -> str:
        listed = ", ".join(f"{name} = {show(value)}" for name, value in self.keys.items())
        old, new = map(show, self.kinds)
        return f"{self.table}.kind = {new}: not used of the file, which wrote it for kind {old}: {listed}"


def drop_keys_of_old_kinds(file: dict[str, Any], raw: dict[str, Any], set_paths: Sequence[Path]) -> list[Dropped]:
    """Take out of `raw` (the tables of `file` with what `--set` changed at `set_paths`) what was written for a kind
    that is no longer chosen."""
    found = []
    for path in dict.fromkeys(path[:-1] for path in set_paths if path[-1] == "kind"):
        replaced = any(other == path[: len(other)] for other in set_paths)
        before, after = value_at(path, file), value_at(path, raw)
        if replaced or not isinstance(before, dict) or not isinstance(after, dict):
            continue
        old, new = (_tables_of(path, raw, node) for node in (before, after))
        if len(old) != 1 or len(new) != 1 or before.get("kind") == after.get("kind"):
            continue  # a kind that nobody knows, or the same
        kept = {other[len(path)] for other in set_paths if other[: len(path)] == path and len(other) > len(path)}
        keys = {name: value for name, value in before.items() if name not in kept and _goes(name, old[0], new[0])}
        for name in keys:
            del after[name]
        if keys:
            found.append(Dropped(dotted(path), (before["kind"], after["kind"]), keys))
    return found


def _tables_of(path: Path, raw: dict[str, Any], node: dict[str, Any]) -> tuple[type[Table], ...]:
    """Tables of the kind that `node` names; none where another package brings that kind and cannot be used, which is
    said when the spec is read."""
    try:
        return chosen_tables(tables_at(path, raw), node)
    except PydanticCustomError:
        return ()


def _goes(name: str, old: type[Table], new: type[Table]) -> bool:
    """Whether `name`, a key of the old kind, is none of the new one, or has another default there. One that is not of
    the old kind either stays: it is a mistake to be named."""
    fields = (old.model_fields.get(name), new.model_fields.get(name))
    if fields[0] is None or name == "kind":
        return False
    return fields[1] is None or fields[0].default != fields[1].default
