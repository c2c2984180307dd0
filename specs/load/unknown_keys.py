"""Keys that the schema does not know: which key was meant, or where it belongs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from specs.errors import Problem
from specs.load.dotted_keys import value_at
from specs.load.foreign_keys import foreign_key, removed_key_hint
from specs.load.keys import Path, chosen_tables, closest, dotted, homes, kind_of, known_keys, tables_at
from specs.packages import page
from specs.text import show

_NEAR, _VERY_NEAR = 0.75, 0.85  # similarity of a mistyped key to one of its table, and of another table


def unknown_keys(path: Path, raw: dict[str, Any]) -> list[Problem]:
    """Return the problem of an unknown key; of another tool's table, one for each key in it."""
    key, given, name = dotted(path), value_at(raw, path), str(path[-1])
    if now := removed_key_hint(path):
        return [Problem(key, "unknown key: it was removed", now, show(given))]
    parent, siblings = value_at(raw, path[:-1]), tables_at(path[:-1], raw)
    if other_kinds := [kind_of(table) for table in siblings if name in known_keys(table)]:
        message = f"unknown key: kind {show(parent['kind'])} does not have it"
        return [Problem(key, message, f"it belongs to kind {show(other_kinds[0])}", show(given))]
    here = [known for table in chosen_tables(siblings, parent) for known in known_keys(table)]
    if isinstance(given, dict) and given and name not in homes() and not closest(name, here, _NEAR):
        hints = {leaf: _hint_in_foreign_table(leaf) for leaf in _leaves(path, given)}
        if any(hints.values()):
            unanswered = f"rlctl has no such key: remove it, or look for what it does in {page('spec.md')}"
            return [
                Problem(dotted(leaf), "unknown key", hint or unanswered, show(value_at(raw, leaf)))
                for leaf, hint in hints.items()
            ]
    return [Problem(key, "unknown key", _hint(path, here), show(given))]


def _leaves(path: Path, value: Any) -> Iterator[Path]:
    if not isinstance(value, dict) or not value:
        yield path
        return
    for name, inner in value.items():
        yield from _leaves((*path, name), inner)


def _hint_in_foreign_table(path: Path) -> str:
    """Return the hint of the key itself, of a table around it that rlctl does without, or of our key with its name."""
    if own := foreign_key(path):
        return own.hint(path)
    around = (foreign_key(path[:end]) for end in range(len(path) - 1, 0, -1))
    return next((table.remark for table in around if table and not table.ours), "") or _elsewhere(path)


def _hint(path: Path, here: list[str]) -> str:
    name, parent = str(path[-1]), dotted(path[:-1])
    if foreign := foreign_key(path):
        return foreign.hint(path)
    if near := closest(name, here, _NEAR):
        return f"did you mean `{near}`?"
    if hint := _elsewhere(path):
        return hint
    others = [key for key in homes() if key != "kind"]
    if far := closest(name, others, _VERY_NEAR):
        return _elsewhere((*path[:-1], far))
    return f"{f'[{parent}]' if parent else 'a spec'} knows: {', '.join(here)}"


def _elsewhere(path: Path) -> str:
    """Name the keys elsewhere that are called like the last part of `path`: those in tables that it names, if any."""
    if path[-1] == "kind":
        return ""
    shared = {key: sum(part in path[:-1] for part in key.split(".")) for key in homes().get(str(path[-1]), ())}
    keys = [key for key, count in shared.items() if count == max(shared.values())]
    return f"did you mean {' or '.join(f'`{key}`' for key in keys[:3])}?" if keys else ""
