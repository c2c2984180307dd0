"""Keys that the schema does not know: another tool's or a removed one, whose tables are the TOML files beside this
module; else which key was meant, or where it belongs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path as File
from typing import Any

import tomli

from specs.errors import Problem
from specs.load.dotted_keys import value_at
from specs.load.keys import Path, chosen_tables, closest, dotted, homes, keys_of, kind_of, known_keys, tables_at
from specs.packages import page
from specs.schema.objectives import objective_kind
from specs.schema.recipes import RECIPES, RowsSpec, spec_class
from specs.schema.roles import ACTOR, ROLES
from specs.schema.spec import Spec
from specs.text import show

_ONLY_TRANSLATED = ("same", "sources", "needed", "implied")
_NEAR, _VERY_NEAR = 0.75, 0.85  # similarity of a mistyped key to one of its table, and of another table


def unknown_keys(path: Path, raw: dict[str, Any]) -> list[Problem]:
    """Return the problem of an unknown key; of another tool's table, one for each key in it."""
    key, given, name = dotted(path), value_at(raw, path), str(path[-1])
    if now := removed_key_hint(path):
        return [Problem(key, "unknown key: it was removed", now, show(given))]
    parent, siblings = value_at(raw, path[:-1]), tables_at(path[:-1], raw)
    if other_kinds := [kind_of(table) for table in siblings if name in known_keys(table)]:
        message = f"unknown key: kind {show(objective_kind(parent))} does not have it"
        return [Problem(key, message, f"it belongs to kind {show(other_kinds[0])}", show(given))]
    here = [known for table in chosen_tables(siblings, parent) for known in known_keys(table)]
    recipe = spec_class(raw)
    if len(path) == 1 and (others := [recipe for recipe, table in RECIPES.items() if name in known_keys(table)]):
        hint = f"it belongs to run.recipe = {' or '.join(map(show, others))}"
        message = "unknown key: this recipe does not have it"
        return [Problem(key, message, hint, show(given) if not isinstance(given, dict) else "")]
    if isinstance(given, dict) and given and name not in homes(recipe) and not closest(name, here, _NEAR):
        hints = {leaf: _hint_in_foreign_table(leaf, recipe) for leaf in _leaves(path, given)}
        if any(hints.values()):
            unanswered = f"rlctl has no such key: remove it, or look for what it does in {page('spec.md')}"
            return [
                Problem(dotted(leaf), "unknown key", hint or unanswered, show(value_at(raw, leaf)))
                for leaf, hint in hints.items()
            ]
    return [Problem(key, "unknown key", _hint(path, here, recipe), show(given))]


def _leaves(path: Path, value: Any) -> Iterator[Path]:
    if not isinstance(value, dict) or not value:
        yield path
        return
    for name, inner in value.items():
        yield from _leaves((*path, name), inner)


def _hint_in_foreign_table(path: Path, recipe: type[Spec]) -> str:
    """Return the hint of the key itself, of a table around it that rlctl does without, or of our key with its name."""
    if own := foreign_key(path, recipe):
        return own.hint(path, recipe)
    around = (foreign_key(path[:end], recipe) for end in range(len(path) - 1, 0, -1))
    hint = next((table.remark for table in around if table and not table.ours), "")
    return hint or _elsewhere(path, recipe) or _of_other_recipes(path, recipe)


def _hint(path: Path, here: list[str], recipe: type[Spec]) -> str:
    name, parent = str(path[-1]), dotted(path[:-1])
    if foreign := foreign_key(path, recipe):
        return foreign.hint(path, recipe)
    if near := closest(name, here, _NEAR):
        return f"did you mean `{near}`?"
    if hint := _elsewhere(path, recipe) or _of_other_recipes(path, recipe):
        return hint
    others = [key for key in homes(recipe) if key != "kind"]
    if far := closest(name, others, _VERY_NEAR):
        return _elsewhere((*path[:-1], far), recipe)
    return f"{f'[{parent}]' if parent else 'a spec'} knows: {', '.join(here)}"


def _elsewhere(path: Path, recipe: type[Spec]) -> str:
    """Name the keys elsewhere that are called like the last part of `path`: those in tables that it names, if any."""
    if path[-1] == "kind":
        return ""
    shared = {key: sum(part in path[:-1] for part in key.split(".")) for key in homes(recipe).get(str(path[-1]), ())}
    keys = [key for key, count in shared.items() if count == max(shared.values())]
    return f"did you mean {' or '.join(f'`{key}`' for key in keys[:3])}?" if keys else ""


def _of_other_recipes(path: Path, recipe: type[Spec]) -> str:
    """Say what another tool's key is in recipes that have it."""
    others = {name: (key, one) for name, one in RECIPES.items() if (key := foreign_key(path, one))}
    key, other = next(iter(others.values()), (ForeignKey(""), recipe))
    named = f" (of run.recipe = {' or '.join(map(show, others))})" if key.ours else ""
    return f"{key.hint(path, other)}{named}"


# ── other tools' keys, and removed ones ───────────────────────────────────────────────────────────


@dataclass(frozen=True, eq=False)
class ForeignKey:
    """Name our key for another tool's, "" where there is none, and remark on it, or say what rlctl does instead. `how`
    translates a value, as `foreign_keys.toml` says, and `only` is the condition on another of their keys."""

    ours: str
    remark: str = ""
    how: Any = None
    only: str = ""

    def of_roles(self, roles: Sequence[Any], recipe: type[Spec]) -> list[str]:
        """Return our key as each of these roles has it; a key of no role once."""
        if not self.ours.startswith(f"{ACTOR}."):
            roles = (ACTOR,)
        keys = (f"{role}{self.ours.removeprefix(ACTOR)}" if role != ACTOR else self.ours for role in roles)
        return [key for key in keys if key in keys_of(recipe)]

    def hint(self, path: Sequence[str | int], recipe: type[Spec]) -> str:
        """Return the next action for the key at `path`. A role that the path names has its own keys."""
        if not self.ours:
            return self.remark
        own = self.of_roles([recipe.lead, *(role for role in path if role in ROLES)], recipe)
        return f"here it is `{own[-1]}`" + (f": {self.remark}" if self.remark else "")


@cache
def foreign_keys(of_rows: bool, /) -> dict[str, ForeignKey]:
    """Return other tools' keys and what each is here; those of one row stand together, with spaces between them.
    `of_rows`: what they are in recipes that learn from rows alone. Each row is one object: the cache has one way in."""
    sections = _read("foreign_keys.toml")
    sections = sections["rows"] if of_rows else sections
    found = {keys: ForeignKey("", instead) for keys, instead in sections["none"].items()}
    for name, rows in sections.items():
        if name not in ("none", "kinds", "rows", *_ONLY_TRANSLATED):
            found |= _rows(rows)
    return found


def _rows(table: dict[str, Any]) -> dict[str, ForeignKey]:
    return {keys: ForeignKey(*([row] if isinstance(row, str) else row)) for keys, row in table.items()}


@cache
def _single_keys(of_rows: bool, same: bool) -> dict[str, ForeignKey]:
    sections = _read("foreign_keys.toml")
    called_as_ours = _rows((sections["rows"] if of_rows else sections)["same"]) if same else {}
    return {key: row for keys, row in (foreign_keys(of_rows) | called_as_ours).items() for key in keys.split()}


def foreign_key(path: Sequence[str | int], recipe: type[Spec], *, same: bool = False) -> ForeignKey | None:
    """Return what another tool's key at `path` is in a recipe, by the longest end of the path that is known. `same`:
    also one that is called as ours."""
    ends = [".".join(map(str, path[start:])) for start in range(len(path))]
    for of_rows in (True, False) if issubclass(recipe, RowsSpec) else (False,):
        known = _single_keys(of_rows, same)
        found = next((known[end] for end in ends if end in known), None)
        if found and (not found.ours or found.of_roles([recipe.lead], recipe)):
            return found
    return None


def translation_table(name: str) -> dict[str, Any]:
    """Return a table for `rlctl init --from`: the `sources`, or what is `needed` or `implied` in a spec."""
    return dict(_read("foreign_keys.toml")[name])


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
    return tomli.loads((File(__file__).parent / name).read_text("utf-8"))
