"""Engines by kind: the class that an engine's table names (`specs/schema/engines/`). Nothing is imported before it is
needed.

Other packages register theirs by entry points (`specs/schema/engines/foreign.py`).
"""

from __future__ import annotations

from importlib import import_module

from backends.protocol import RolloutEngine, TrainEngine
from specs.schema.engines.engine_registry import own_kinds
from specs.schema.engines.foreign import Family, foreign_engine, foreign_kinds


def train_engine(kind: str) -> type[TrainEngine]:
    """Raises LookupError for an unknown kind."""
    engine = _find("train", kind)
    assert issubclass(engine, TrainEngine)
    return engine


def rollout_engine(kind: str) -> type[RolloutEngine]:
    """Raises LookupError for an unknown kind."""
    engine = _find("rollout", kind)
    assert issubclass(engine, RolloutEngine)
    return engine


def _find(family: Family, kind: str) -> type:
    own = own_kinds(family)
    if kind in own:
        where = own[kind].engine_class
        assert where is not None, kind
        module, _, name = where.partition(":")
        found = getattr(import_module(module), name)
    else:
        found = foreign_engine(family, kind)
    if found is None:
        known = ", ".join([*own, *foreign_kinds(family)])
        raise LookupError(f"no {family} engine of kind {kind!r}; known: {known}")
    assert isinstance(found, type)
    return found
