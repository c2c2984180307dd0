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
    """The spec's key, where `{role}` stands for the role → the paths that it decides, and all below them."""
    refused: Mapping[str, str]
    """Why rlctl cannot train with a key → beginnings of paths; the longest that fits counts."""
    no_auto: tuple[str, str] = ("", "")
    """Problem and hint of the value "auto"; empty: it is a value like any other."""

    def problems(self, role: str, learns: bool, own: Mapping[str, Any], settings: Settings) -> Iterator[Problem]:
        """Find what is wrong with a role's own keys by the spec alone."""
        for path, value in leaves(own):
            message, hint = self._problem(role, learns, path, value, settings)
            if message:
                yield Problem(f"{role}.engine.{self.table}.{path}", message, hint, show(value))

    def _problem(self, role: str, learns: bool, path: str, value: object, settings: Settings) -> tuple[str, str]:
        fixed, remove = settings.fixed, "remove the key"
        if path in fixed and _same(value, fixed[path]):
            return "", ""
        if any(other.startswith(f"{path}.") for other in (*fixed, *settings.defaults)):
            return f"is a table in {self.name}'s configuration", "write the keys below it"
        if path not in settings.defaults:
            ours = f"{path} = {show(fixed[path])}" if path in fixed else ""
            if owner := _owner(self.decided_by, path, "."):
                if not learns and owner.startswith("{role}.optimizer"):
                    return f"has no effect: {role} does not learn", remove
                owner, what = owner.format(role=role), f"there it makes {ours}" if ours else f"{path} is not used"
                return f"contradicts {owner}: {what}", f"{remove} and set {owner}"
            if ours:
                return f"rlctl sets {ours}", remove
            if why := _owner(self.refused, path, ""):
                return f"is not supported: {why}", remove
        return self.no_auto if value == "auto" else ("", "")


def _owner(table: Mapping[str, str], path: str, end: str) -> str:
    """Return the key of a table whose value has the longest beginning of a path, up to an `end`; "": none has one."""
    starts = {start: owner for owner, starts in table.items() for start in starts.split()}
    fitting = [start for start in starts if f"{path}{end}".startswith(f"{start}{end}")]
    return starts[max(fitting, key=len)] if fitting else ""


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
