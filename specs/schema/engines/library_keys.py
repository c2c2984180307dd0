"""Keys of a library's own configuration in a spec: what each takes, and how they stand beside what the spec decides.

A train engine may let a person add keys that the spec does not have (`[actor.engine.deepspeed]`,
`[actor.engine.megatron]`). A key that says otherwise than the spec, that the library does not know, or that does not go
with the engine, is a problem.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import date, time
from typing import TYPE_CHECKING, Any

from specs.errors import Problem
from specs.text import show

if TYPE_CHECKING:
    from specs.schema.role_section import Optimizer


@dataclass(frozen=True)
class Flag:
    words: str = "true or false"

    def takes(self, value: object) -> bool:
        return isinstance(value, bool)


@dataclass(frozen=True)
class Number:
    """A finite number; `whole` ones may be written with an exponent, as 5e8."""

    least: float = -math.inf
    most: float = math.inf
    whole: bool = True

    @property
    def words(self) -> str:
        bounds = [f"at least {self.least:g}"] if self.least > -math.inf else []
        bounds += [f"at most {self.most:g}"] if self.most < math.inf else []
        return " ".join(["a whole number" if self.whole else "a number", " and ".join(bounds)]).strip()

    def takes(self, value: object) -> bool:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            return False
        return self.least <= value <= self.most and (not self.whole or value == int(value))


@dataclass(frozen=True)
class Text:
    choices: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        return " or ".join(map(show, self.choices)) or "text"

    def takes(self, value: object) -> bool:
        return isinstance(value, str) and (not self.choices or value in self.choices)


@dataclass(frozen=True)
class Texts:
    words: str = "a list of texts"

    def takes(self, value: object) -> bool:
        return isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)


Kind = Flag | Number | Text | Texts
LEAVE_OUT = "leave it out for {library}'s default"


@dataclass(frozen=True)
class Setting:
    """One leaf of the derived configuration. `fixed`: a key of the spec's table may not change it."""

    path: str
    value: object
    fixed: bool = True


@dataclass(frozen=True)
class Library:
    """What an engine knows of its library's keys."""

    name: str
    table: str  # of the engine's table: the key that holds them
    decided_by: Mapping[str, str]  # path, or what it starts with → the spec's key that says it; `{role}` stands for it
    unsupported: Callable[[str], str | None]  # why a path does not go with the engine
    wrong: Callable[[str, str, object], Problem | None]  # table, path, value → what is wrong with the key by itself


def extra_problems(
    library: Library, role: str, optimizer: Optimizer | None, extra: Mapping[str, Any], derived: Iterator[Setting]
) -> Iterator[Problem]:
    """What is wrong with a role's extra keys. `optimizer` None: a role that does not learn."""
    settings = {setting.path: setting for setting in derived}
    for path, value in leaves(extra):
        yield from _leaf_problems(library, role, optimizer, path, value, settings)


def _leaf_problems(
    library: Library,
    role: str,
    optimizer: Optimizer | None,
    path: str,
    value: object,
    derived: Mapping[str, Setting],
) -> Iterator[Problem]:
    table = f"{role}.engine.{library.table}"
    key, setting = f"{table}.{path}", derived.get(path)
    if setting is not None and value == setting.value and isinstance(value, bool) == isinstance(setting.value, bool):
        return
    if any(name.startswith(f"{path}.") for name in derived):
        yield Problem(key, f"is a table in {library.name}'s configuration", "write the keys below it", show(value))
        return
    by = _decider(library.decided_by, path) if setting is None or setting.fixed else None
    if by is not None and optimizer is None and by.startswith("{role}.optimizer"):
        yield Problem(key, f"has no effect: {role} does not learn", "remove the key", show(value))
    elif by is not None:
        owner = by.format(role=role)
        said = f"there it makes {path} = {show(setting.value)}" if setting else f"{library.name}'s {path} is not used"
        yield Problem(key, f"contradicts {owner}: {said}", f"remove the key and set {owner}", show(value))
    elif setting is not None and setting.fixed:
        yield Problem(key, f"rlctl needs {path} = {show(setting.value)}", "remove the key", show(value))
    elif why := library.unsupported(path):
        yield Problem(key, f"is not supported: {why}", "remove the key", show(value))
    elif wrong := library.wrong(table, path, value):
        yield wrong


def _decider(decided_by: Mapping[str, str], path: str) -> str | None:
    parts = path.split(".")
    return next((by for n in range(len(parts), 0, -1) if (by := decided_by.get(".".join(parts[:n])))), None)


def not_taken(library: str, key: str, kind: Kind, value: object) -> Problem:
    """A value that a key does not take."""
    what = "a date or time" if isinstance(value, date | time) else ""
    message = f"must be {kind.words}{f', not {what}' if what else ''}"
    return Problem(key, message, LEAVE_OUT.format(library=library), show(value))


def leaves(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Dotted path and value of everything in a table that is no table."""
    for name, value in table.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from leaves(value, f"{path}.")
        else:
            yield path, value
