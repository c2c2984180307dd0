"""Repairs a broken spec so that the rules can check the rest and all problems are reported at once.

A problem of the repaired spec may come from the repair itself: `Repaired.doubts` says so.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from specs.errors import Problem
from specs.load.explain import without_tags
from specs.load.keys import Path, chosen_tables, tables_at, value_at
from specs.schema.engines.foreign import tuples
from specs.schema.spec import Spec
from specs.schema.table import Table

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

_ROUNDS = 3  # what was hidden behind something broken may be broken too


@dataclass(frozen=True)
class Repaired:
    """A repaired spec, not the user's. `exact`: only unknown keys and values with a default were removed."""

    spec: Spec
    exact: bool
    names: frozenset[str]  # last parts of the keys that were taken out, and of those that the hints name

    def doubts(self, problem: Problem) -> bool:
        """Whether a problem of the repaired spec may be one of the repair."""
        words = set(re.findall(r"\w+", f"{problem.key} {problem.message} {problem.hint}"))
        return not self.names.isdisjoint(words)


def repaired(raw: dict[str, Any], errors: Sequence[ErrorDetails], problems: Sequence[Problem]) -> Repaired | None:
    """The spec of `raw` without what `errors` say is wrong; None where what is left cannot be a spec."""
    raw, exact = copy.deepcopy(raw), True
    names = {re.split(r"[.\[\]]+", problem.key.strip("[]"))[-1] for problem in problems}
    for problem in problems:
        names |= {name.rpartition(".")[2] for name in re.findall(r"`([\w.]+)`", problem.hint)}
    for _ in range(_ROUNDS):
        for error in errors:
            outcome = _take_out(raw, without_tags(error["loc"], raw))
            if outcome is None:
                return None
            exact = exact and outcome
        try:
            return Repaired(Spec.model_validate(tuples(raw), strict=True), exact, frozenset(names))
        except ValidationError as error:
            errors = error.errors(include_url=False)
            names |= {str(one["loc"][-1]) for one in errors}
    return None


def _take_out(raw: dict[str, Any], path: Path) -> bool | None:
    """True: the key, or the list that it is in, could be removed; False: a required number became 1; None: neither was
    possible."""
    while path and isinstance(path[-1], int):
        path = path[:-1]  # a list goes as a whole
    if not path:
        return None
    parent, name = value_at(path[:-1], raw), path[-1]
    if not isinstance(parent, dict):
        return None
    field = _field(raw, path)
    if field is None or not field.is_required():
        parent.pop(name, None)
        return True
    if field.annotation in (int, float):
        parent[name] = field.annotation(1)
        return False
    return _take_out(raw, path[:-1]) if len(path) > 1 and isinstance(path[-2], int) else None


def _field(raw: dict[str, Any], path: Path) -> Any:
    parent = path[:-1]
    tables: tuple[type[Table], ...] = chosen_tables(tables_at(parent, raw), value_at(parent, raw))
    return next((table.model_fields[name] for table in tables if (name := str(path[-1])) in table.model_fields), None)
