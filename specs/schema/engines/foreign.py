"""Engines of other packages, found by their entry points in the group `rlctl.engines`.

    train.<kind>         the engine's class            (read by `backends/registry.py`, in a role's process)
    table.train.<kind>   its table in the spec         (read here, where the spec is read: it must not import torch)

and the same with `rollout`. A table is a `TrainTable` or `RolloutTable` (`engine_table.py`) with `kind:
Literal["<kind>"]`; all its other keys have defaults, and a key that it does not know is refused as everywhere. It may
answer the static questions of its base class; what it leaves open is not known. An engine without keys and answers
needs no table.

Nothing is looked for before a spec names a kind that is not rlctl's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal, get_args

from pydantic import SerializationInfo, ValidationError, ValidatorFunctionWrapHandler, create_model
from pydantic_core import PydanticCustomError

from specs.schema.engines.engine_table import EngineTable, RolloutTable, TrainTable

GROUP = "rlctl.engines"
Family = Literal["train", "rollout"]
_BASES: dict[Family, type[EngineTable]] = {"train": TrainTable, "rollout": RolloutTable}


def foreign_kinds(family: Family) -> list[str]:
    """Return the kinds that installed packages bring. Imports none of them."""
    return sorted(name.partition(".")[2] for name in _points() if name.startswith(f"{family}."))


def foreign_engine(family: Family, kind: str) -> Any:
    """Return the engine's class, imported now; None where no package brings that kind."""
    point = _points().get(f"{family}.{kind}")
    return point.load() if point else None


@cache
def foreign_table(family: Family, kind: str) -> type[EngineTable] | None:
    """Return the spec table of another package's engine; None where no package brings that kind. Raises
    PydanticCustomError, which pydantic reports at the table's key, where the package is broken."""
    if f"{family}.{kind}" not in _points():
        return None
    point = _points().get(f"table.{family}.{kind}")
    return _only_kind(family, kind) if point is None else _load(point, family, kind)


def or_foreign(family: Family) -> Callable[[Any, ValidatorFunctionWrapHandler], Any]:
    """Wrap the union of rlctl's own tables: a kind that is none of theirs may be another package's."""

    def validate(value: Any, own_tables: ValidatorFunctionWrapHandler) -> Any:
        try:
            return own_tables(value)
        except ValidationError as error:
            kind = value.get("kind") if isinstance(value, Mapping) else getattr(value, "kind", None)
            unknown = error.errors(include_input=False)[0]["type"] == "union_tag_invalid"
            table = foreign_table(family, kind) if unknown and isinstance(kind, str) else None
            if table is None:
                raise
        return value if isinstance(value, table) else table.model_validate(tuples(value), strict=True)

    return validate


def dump(value: EngineTable, info: SerializationInfo) -> dict[str, Any]:
    """Return the keys of an engine's table, whoever wrote it."""
    return value.model_dump(mode=info.mode)


def tuples(value: Any) -> Any:
    """Turn TOML's and JSON's arrays into the schema's tuples, at every depth."""
    if isinstance(value, Mapping):
        return {name: tuples(item) for name, item in value.items()}
    return tuple(tuples(item) for item in value) if isinstance(value, list) else value


@cache
def _points() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}


def _only_kind(family: Family, kind: str) -> type[EngineTable]:
    only: Any = Literal[kind]
    return create_model("ForeignTable", __base__=_BASES[family], kind=(only, kind))


def _load(point: EntryPoint, family: Family, kind: str) -> type[EngineTable]:
    where = f"{point.value!r} of the package {point.dist.name if point.dist else '?'}"
    try:
        table = point.load()
    except (ImportError, AttributeError) as error:
        raise _broken(f"{where} cannot be imported: {type(error).__name__}: {error}") from None
    base = _BASES[family]
    if not (isinstance(table, type) and issubclass(table, base)):
        raise _broken(f"{where} is not a {base.__module__}.{base.__name__}")
    if kind not in get_args(table.model_fields["kind"].annotation):
        raise _broken(f"{where} has no `kind: Literal[{kind!r}]`")
    return table


def _broken(message: str) -> PydanticCustomError:
    return PydanticCustomError("foreign_engine", "{why}", {"why": message})
