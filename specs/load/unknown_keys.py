"""Keys that a spec does not know: which key was meant, where it belongs, or what another tool's key is here."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path as FilePath
from typing import Any

import tomli

from specs.errors import Problem
from specs.load.foreign_values import converted
from specs.load.keys import (
    Path,
    chosen_tables,
    closest,
    dotted,
    homes,
    kind_of,
    known_keys,
    of_the_same_words,
    tables_at,
    value_at,
)
from specs.load.synonyms import ABSENT, NOT_YET, SECTIONS, SYNONYMS, TABLES, TWINS
from specs.text import show

NEVER_KEYS = {
    "lora": ("only roles that learn have adapters", "write it as actor.lora"),
}


@cache
def removed_keys() -> dict[str, str]:
    """Return the dotted keys of earlier versions, with what each was for and what does it now."""
    return tomli.loads((FilePath(__file__).parent / "removed_keys.toml").read_text("utf-8"))


def unknown_keys(path: Path, raw: dict[str, Any]) -> list[Problem]:
    """The problem of an unknown key; of another tool's table, one for each key in it."""
    name, value, whole = str(path[-1]), value_at(path, raw), unknown_key(path, raw)
    if not (isinstance(value, dict) and value) or name in homes() or not (name in TABLES or name in SYNONYMS):
        return [whole]
    hints = {leaf: _foreign_hint(leaf, raw) for leaf in _foreign_leaves(path, value)}
    if not any(hints.values()):
        return [whole]
    said = {leaf: hint or whole.hint for leaf, hint in hints.items()}
    return [Problem(dotted(leaf), whole.message, hint, show(value_at(leaf, raw))) for leaf, hint in said.items()]


def _foreign_leaves(path: Path, value: Any) -> Iterator[Path]:
    """Every key below a table; a table that has an answer of its own is one."""
    if not (isinstance(value, dict) and value) or _absent(str(path[-1])):
        yield path
        return
    for name, inner in value.items():
        yield from _foreign_leaves((*path, name), inner)


def _foreign_hint(path: Path, raw: dict[str, Any]) -> str:
    """What a key in another tool's table is here; empty where nothing is known of it."""
    if path[-1] in ("enable", "enabled") and len(path) > 2:
        return _foreign_hint(path[:-1], raw)
    parent, name = _ours(path[:-1]), str(path[-1])
    here = [known for one in tables_at(parent, {}) for known in known_keys(one)] if parent else []
    of_this_table = SYNONYMS.get(dotted(path[-2:]), "")
    if name in here and not of_this_table:
        return f"did you mean `{dotted((*parent, name))}`?"
    if said := of_this_table or SYNONYMS.get(name, ""):
        last = said.rpartition(".")[2]
        return _renamed(path, dotted((*parent, last)) if last in here else said, raw)
    if absent := _absent(name):
        return absent
    return _any_of(elsewhere, parent) if (elsewhere := homes().get(name)) else ""


def _ours(path: Path) -> Path:
    """The table of a spec that holds what another tool's table does, as far as its names tell."""
    table: Path = ()
    for part in map(str, path):
        place = tuple(TABLES[part].split(".")) if TABLES.get(part) else ()
        here = [known for one in tables_at(table, {}) for known in known_keys(one)]
        if part in here:
            table = (*table, part)
        elif place and place[-1] in here:
            table = (*table, place[-1])
        elif place:
            table = place
    return table


def _absent(name: str) -> str:
    """What is said of a key that rlctl does not have; empty where it has one of this name."""
    if name in homes():
        return ""
    if name in NOT_YET:
        return f"another tool's key; what it does is not in rlctl yet: remove {name}"
    return ABSENT.get(name, "")


def unknown_key(path: Path, raw: dict[str, Any]) -> Problem:
    """Name the closest key of the same table, or where the key belongs."""
    name, parent = str(path[-1]), path[:-1]
    key, value = dotted(path), show(value_at(path, raw))
    if name in NEVER_KEYS:
        message, hint = NEVER_KEYS[name]
        return Problem(key, message, hint, value)
    if now := removed_keys().get(dotted(["N" if isinstance(part, int) else part for part in path])):
        return Problem(key, "unknown key: it was removed", now, value)
    siblings = tables_at(parent, raw)
    here = [known for table in chosen_tables(siblings, value_at(parent, raw)) for known in known_keys(table)]
    other_kinds = [kind_of(table) for table in siblings if name in known_keys(table)]
    if other_kinds:
        kind = value_at((*parent, "kind"), raw)
        here_called = next((own for own in TWINS.get(name, ()) if own in here), "")
        hint = f"it belongs to kind {show(other_kinds[0])}" + (f"; here it is `{here_called}`" if here_called else "")
        return Problem(key, f'unknown key: kind "{kind}" does not have it', hint, value)
    return Problem(key, "unknown key", _where(path, here, raw), value)


def _renamed(path: Path, ours: str, raw: dict[str, Any]) -> str:
    """Our name of another tool's key, and what its value is here where that differs."""
    found = converted(path, value_at(path, raw), raw)
    if found is None:
        return f"did you mean `{ours}`?"
    return f"did you mean `{found.key or ours}`? {found.words}"


def _where(path: Path, here: list[str], raw: dict[str, Any]) -> str:
    name, parent = str(path[-1]), path[:-1]
    if not parent and name in SECTIONS:
        return f"its place is {SECTIONS[name]}"
    if of_this_section := SYNONYMS.get(dotted((*parent, name))):
        return _renamed(path, of_this_section, raw)
    if absent := _absent(dotted(path[-2:])) or _absent(name):
        return absent
    foreign = SYNONYMS.get(name, "")
    if foreign and (last := foreign.rpartition(".")[2]) in here:
        return _renamed(path, dotted((*parent, last)), raw)
    near = closest(name, here, cutoff=0.75)
    if near and not foreign:
        return f"did you mean `{near}`?"
    if (elsewhere := homes().get(name, ())) and name != "kind":
        return _any_of(elsewhere, parent)
    if foreign:
        return _renamed(path, foreign, raw)
    near = of_the_same_words(name, here)
    if near:
        return f"did you mean `{near}`?"
    others = [key for key in homes() if key != "kind"]  # a kind elsewhere is another choice
    far = closest(name, others, cutoff=0.85) or of_the_same_words(name, others, least=2)
    if far:
        return f"did you mean `{_nearest_first(homes()[far], parent)[0]}`?"
    where = f"[{dotted(parent)}]" if parent else "a spec"
    return f"{where} knows: {', '.join(here)}"


def _any_of(keys: tuple[str, ...], parent: Path) -> str:
    listed = " or ".join(f"`{key}`" for key in _nearest_first(keys, parent)[:3])
    return f"did you mean {listed}?"


def _nearest_first(keys: tuple[str, ...], parent: Path) -> list[str]:
    top = str(parent[0]) if parent else ""
    return sorted(keys, key=lambda key: (not key.startswith(f"{top}."), key.count("."), key))
