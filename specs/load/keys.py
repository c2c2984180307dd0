"""The schema as a tree of keys: which keys a table knows, which are near, and where a key belongs."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, get_args

from specs.load.dotted_keys import value_at
from specs.schema.engines import foreign
from specs.schema.engines.engine_table import RolloutTable, TrainTable
from specs.schema.objectives import objective_kind
from specs.schema.recipes import RECIPES, spec_class
from specs.schema.spec import Spec
from specs.schema.table import Table

Path = tuple[str | int, ...]


@cache
def known_keys(table: type[Table]) -> dict[str, Any]:
    """Return TOML name → annotation of a table's keys."""
    return {field.alias or name: field.annotation for name, field in table.model_fields.items()}


def tables_of(annotation: Any) -> tuple[type[Table], ...]:
    """Return the tables that may stand where `annotation` is, in unions, lists and `Annotated`."""
    if isinstance(annotation, type) and issubclass(annotation, Table):
        return (annotation,)
    return tuple(dict.fromkeys(table for part in get_args(annotation) for table in tables_of(part)))


def is_list(annotation: Any) -> bool:
    """Tell whether a key takes a list."""
    return getattr(annotation, "__origin__", None) is tuple


def kinds_of(table: type[Table]) -> tuple[str, ...]:
    """Return the kinds that choose this table: its name, then aliases. Empty where nothing is chosen."""
    field = table.model_fields.get("kind")
    return get_args(field.annotation) if field else ()


def kind_of(table: type[Table]) -> str:
    """Return the `kind` that chooses this table, or ""."""
    return next(iter(kinds_of(table)), "")


def engine_family(tables: Sequence[type[Table]]) -> foreign.Family | None:
    """Return whose engines a key takes that allows these tables; None where it takes no engine."""
    if any(issubclass(table, TrainTable) for table in tables):
        return "train"
    return "rollout" if any(issubclass(table, RolloutTable) for table in tables) else None


def tables_at(path: Sequence[str | int], raw: Any) -> tuple[type[Table], ...]:
    """Return the tables that the schema allows at `path`; where several kinds do, all of them."""
    tables: tuple[type[Table], ...] = (spec_class(raw),)
    node = raw
    for part in path:
        if isinstance(part, str):
            chosen = chosen_tables(tables, node)
            tables = tuple(sub for table in chosen for sub in tables_of(known_keys(table).get(part)))
        node = value_at(node, (part,))
    return tuple(dict.fromkeys(tables))


def chosen_tables(tables: tuple[type[Table], ...], node: Any) -> tuple[type[Table], ...]:
    """Return the tables that the node's own `kind` chooses, another package's too; all when it chooses none."""
    kind = objective_kind(node)
    if not isinstance(kind, str):
        return tables
    if chosen := tuple(table for table in tables if kind in kinds_of(table)):
        return chosen
    family = engine_family(tables)
    found = foreign.foreign_table(family, kind) if family else None
    return (found,) if found else tables


def dotted(path: Sequence[str | int]) -> str:
    """Return a path as a dotted key."""
    return ".".join(str(part) for part in path)


def walk(table: type[Table], prefix: str = "") -> Iterator[tuple[str, type[Table]]]:
    """Yield every (dotted key, table that owns it); list entries are written `terms.N`."""
    for name, annotation in known_keys(table).items():
        yield f"{prefix}{name}", table
        for sub in tables_of(annotation):
            yield from walk(sub, f"{prefix}{name}.N." if is_list(annotation) else f"{prefix}{name}.")


def leaves() -> list[str]:
    """Return every dotted key that holds a value and no table, in the order of the schema."""
    keys = dict.fromkeys(key for recipe in RECIPES.values() for key, _ in walk(recipe))
    parents = {key.rpartition(".")[0] for key in keys}
    return [key for key in keys if key not in parents and f"{key}.N" not in parents]


@cache
def keys_of(recipe: type[Spec]) -> frozenset[str]:
    """Return every dotted key of a recipe, of values and of tables."""
    return frozenset(key for key, _ in walk(recipe))


@cache
def homes(recipe: type[Spec]) -> dict[str, tuple[str, ...]]:
    """Return last part of a key → every dotted key of a recipe that ends so."""
    found: dict[str, list[str]] = {}
    for key, _ in walk(recipe):
        found.setdefault(key.rpartition(".")[2], []).append(key)
    return {name: tuple(dict.fromkeys(keys)) for name, keys in found.items()}


def closest(word: str, known: Sequence[str], cutoff: float = 0.6) -> str:
    """Return the known word with the most letters in order, or the same ones in another; "" where none is near."""
    near = difflib.get_close_matches(word.lower(), known, n=1, cutoff=cutoff)
    return near[0] if near else next((one for one in known if sorted(one) == sorted(word.lower())), "")
