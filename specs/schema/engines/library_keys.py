"""Keys of a library's own configuration in a spec: `[actor.engine.deepspeed]`, `[actor.engine.megatron]`.

They are handed on as they are. By the spec alone it is known what contradicts the spec, and what rlctl cannot train
with. Whether the library knows a key and takes its value, the library says where it is installed: under
`check-config --probe`, and when the role is built.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from specs.errors import Problem
from specs.text import show


@dataclass(frozen=True)
class Settings:
    """Settings that rlctl gives the library, by dotted path. A spec may change `defaults`, and `fixed` never."""

    fixed: Mapping[str, object]
    defaults: Mapping[str, object]


@dataclass(frozen=True)
class Library:
    """A library's name, the key of the engine's table that holds its keys, and those that a spec may not change."""

    name: str
    table: str
    decided_by: Mapping[str, str]
    """Path, or what it starts with → the spec's key that says it; `{role}` stands for the role."""
    refused: Mapping[str, str]
    """Path, or what it starts with → why rlctl cannot train with it; the longest that fits counts."""

    def problems(self, role: str, learns: bool, own: Mapping[str, Any], settings: Settings) -> Iterator[Problem]:
        """Find what is wrong with a role's own keys by the spec alone."""
        for path, value in leaves(own):
            key, given = f"{role}.engine.{self.table}.{path}", show(value)
            if path in settings.fixed and _same(value, settings.fixed[path]):
                continue
            if any(other.startswith(f"{path}.") for other in (*settings.fixed, *settings.defaults)):
                yield Problem(key, f"is a table in {self.name}'s configuration", "write the keys below it", given)
            elif path in settings.defaults:
                continue
            elif (by := self._decider(path)) and not learns and by.startswith("{role}.optimizer"):
                yield Problem(key, f"has no effect: {role} does not learn", "remove the key", given)
            elif by:
                owner, there = by.format(role=role), path in settings.fixed
                what = f"there it makes {path} = {show(settings.fixed[path])}" if there else f"{path} is not used"
                yield Problem(key, f"contradicts {owner}: {what}", f"remove the key and set {owner}", given)
            elif path in settings.fixed:
                message = f"rlctl sets {path} = {show(settings.fixed[path])}"
                yield Problem(key, message, "remove the key", given)
            elif fitting := [start for start in self.refused if path.startswith(start)]:
                why = self.refused[max(fitting, key=len)]
                yield Problem(key, f"is not supported: {why}", "remove the key", given)

    def _decider(self, path: str) -> str:
        parts = path.split(".")
        starts = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
        return next((self.decided_by[start] for start in starts if start in self.decided_by), "")


def _same(value: object, other: object) -> bool:
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def leaves(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield dotted path and value of everything in a table that is no table."""
    for name, value in table.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from leaves(value, f"{path}.")
        else:
            yield path, value
