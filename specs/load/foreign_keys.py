"""Keys of other tools, and removed keys of rlctl: what each is called here. The tables are the TOML files beside this
module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import tomli

from specs.load.keys import all_keys
from specs.schema.roles import ACTOR, ROLES


@dataclass(frozen=True)
class ForeignKey:
    """Name our key for another tool's, "" where there is none, and remark on it, or say what rlctl does instead."""

    ours: str
    remark: str = ""

    def hint(self, path: Sequence[str | int]) -> str:
        """Return the next action for the key at `path`. A role that the path names has its own keys."""
        if not self.ours:
            return self.remark
        roles = [ours for ours in (_of_role(role, self.ours) for role in path) if ours]
        return f"here it is `{(roles or [self.ours])[-1]}`" + (f": {self.remark}" if self.remark else "")


def _of_role(role: str | int, ours: str) -> str:
    """Return the role's key that is called like the actor's; "" where it has none."""
    key = f"{role}{ours.removeprefix(ACTOR)}"
    return key if role in ROLES and ours.startswith(f"{ACTOR}.") and key in all_keys() else ""


@cache
def foreign_keys() -> dict[str, ForeignKey]:
    """Return other tools' keys and what each is here; those of one row stand together, with spaces between them."""
    sections = _read("foreign_keys.toml")
    found = {keys: ForeignKey("", instead) for keys, instead in sections["none"].items()}
    for name, rows in sections.items():
        if name not in ("none", "kinds"):
            found |= {keys: ForeignKey(*([row] if isinstance(row, str) else row)) for keys, row in rows.items()}
    return found


@cache
def _single_keys() -> dict[str, ForeignKey]:
    return {key: row for keys, row in foreign_keys().items() for key in keys.split()}


def foreign_key(path: Sequence[str | int]) -> ForeignKey | None:
    """Return what another tool's key at `path` is here, by the longest end of the path that is known."""
    known = _single_keys()
    ends = (".".join(map(str, path[start:])) for start in range(len(path)))
    return next((known[end] for end in ends if end in known), None)


def foreign_kind_hint(kind: Any) -> str:
    """Return what another tool's `kind` is here; "" where it is not known."""
    rows = _read("foreign_keys.toml")["kinds"]
    return next((hint for kinds, hint in rows.items() if kind in kinds.split()), "")


def removed_key_hint(path: Sequence[str | int]) -> str:
    """Return what a key of an earlier version was for and what does it now; "" where it is none."""
    key = ".".join("N" if isinstance(part, int) else part for part in path)
    return str(_read("removed_keys.toml").get(key, ""))


@cache
def _read(name: str) -> dict[str, Any]:
    return tomli.loads((Path(__file__).parent / name).read_text("utf-8"))
