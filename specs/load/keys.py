"""The schema as a tree of keys: which keys a table knows, which are near, and where a key belongs."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, get_args

from specs.schema.engines import foreign
from specs.schema.engines.engine_table import RolloutTable, TrainTable
from specs.schema.spec import Spec
from specs.schema.table import Table

Path = tuple[str | int, ...]
_TELLING = 7  # letters of a name below which its words stand in too many others


@cache
def known_keys(table: type[Table]) -> dict[str, Any]:
    """TOML name → annotation of a table's keys."""
    return {field.alias or name: field.annotation for name, field in table.model_fields.items()}


def tables_of(annotation: Any) -> tuple[type[Table], ...]:
    """Tables that may stand where `annotation` is, looked for in unions, lists and `Annotated`."""
    if isinstance(annotation, type) and issubclass(annotation, Table):
        return (annotation,)
    return tuple(table for part in get_args(annotation) for table in tables_of(part))


def is_list(annotation: Any) -> bool:
    return getattr(annotation, "__origin__", None) is tuple


def kinds_of(table: type[Table]) -> tuple[str, ...]:
    """The kinds that choose this table: the first is its name, others are aliases. Empty where nothing is chosen."""
    field = table.model_fields.get("kind")
    return get_args(field.annotation) if field else ()


def kind_of(table: type[Table]) -> str:
    """The `kind` that chooses this table, or ""."""
    return next(iter(kinds_of(table)), "")


def engine_family(tables: Sequence[type[Table]]) -> foreign.Family | None:
    """Whose engines a key takes that allows these tables; None where it takes no engine."""
    if any(issubclass(table, TrainTable) for table in tables):
        return "train"
    return "rollout" if any(issubclass(table, RolloutTable) for table in tables) else None


def tables_at(path: Sequence[str | int], raw: Any) -> tuple[type[Table], ...]:
    """Tables that the schema allows at `path`; where several kinds do, all of them."""
    tables: tuple[type[Table], ...] = (Spec,)
    node = raw
    for part in path:
        if isinstance(part, str):
            chosen = chosen_tables(tables, node)
            tables = tuple(sub for table in chosen for sub in tables_of(known_keys(table).get(part)))
        node = _child(node, part)
    return tuple(dict.fromkeys(tables))


def chosen_tables(tables: tuple[type[Table], ...], node: Any) -> tuple[type[Table], ...]:
    """Those that the node's own `kind` chooses, another package's too; all when it chooses none."""
    kind = node.get("kind") if isinstance(node, dict) else None
    if not isinstance(kind, str):
        return tables
    if chosen := tuple(table for table in tables if kind in kinds_of(table)):
        return chosen
    family = engine_family(tables)
    found = foreign.foreign_table(family, kind) if family else None
    return (found,) if found else tables


def _child(node: Any, part: str | int) -> Any:
    if isinstance(node, dict) and isinstance(part, str):
        return node.get(part)
    if isinstance(node, list) and isinstance(part, int) and part < len(node):
        return node[part]
    return None


def value_at(path: Sequence[str | int], raw: Any) -> Any:
    for part in path:
        raw = _child(raw, part)
    return raw


def dotted(path: Sequence[str | int]) -> str:
    return ".".join(str(part) for part in path)


def walk(table: type[Table] = Spec, prefix: str = "") -> Iterator[tuple[str, type[Table]]]:
    """Every (dotted key, table that owns it); list entries are written `terms.N`."""
    for name, annotation in known_keys(table).items():
        yield f"{prefix}{name}", table
        for sub in tables_of(annotation):
            yield from walk(sub, f"{prefix}{name}.N." if is_list(annotation) else f"{prefix}{name}.")


def leaves() -> list[str]:
    """Every dotted key that holds a value and no table, in the order of the schema."""
    keys = dict.fromkeys(key for key, _ in walk())
    parents = {key.rpartition(".")[0] for key in keys}
    return [key for key in keys if key not in parents and f"{key}.N" not in parents]


@cache
def homes() -> dict[str, tuple[str, ...]]:
    """Last part of a key → every dotted key that ends so."""
    found: dict[str, list[str]] = {}
    for key, _ in walk():
        found.setdefault(key.rpartition(".")[2], []).append(key)
    return {name: tuple(dict.fromkeys(keys)) for name, keys in found.items()}


def of_the_same_words(name: str, known: Sequence[str], least: int = 1) -> str:
    """The key that says all that `name` says and more, or what it says less an addition; "" of none. Letters in common
    are no kinship: `quantization` is not `attn_implementation`. `least`: words that they must share."""
    said = name.lower().split("_")
    kin = {key: _shared(said, key.split("_")) for key in known}
    near = [key for key, words in kin.items() if words >= least]
    return max(near, key=lambda key: (kin[key], -len(key)), default="")


def _shared(said: Sequence[str], key: Sequence[str]) -> int:
    """Words in common where they are all of one of the two names, and tell enough; a single word must be the thing
    itself, which stands last."""
    same = set(said) & set(key)
    whole = same == set(said) or (same == set(key) and (len(same) > 1 or key[-1] == said[-1]))
    return len(same) if whole and sum(map(len, same)) >= _TELLING else 0


def closest(word: str, known: Sequence[str], cutoff: float = 0.6) -> str:
    """The one with the most letters in order; one of the same letters is a slip of the fingers. "" of none."""
    near = difflib.get_close_matches(word.lower(), known, n=1, cutoff=cutoff)
    return near[0] if near else next((one for one in known if sorted(one) == sorted(word.lower())), "")
