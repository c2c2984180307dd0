"""Hints for findings that name no next action: bounds, choices, the shape of a table."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from pydantic_core import PydanticUndefined

from specs.load.keys import Path, chosen_tables, dotted, kinds_of, tables_at, value_at
from specs.packages import page
from specs.text import show_default

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

# Keys that name a function of the user's, and an example of one.
_FUNCTIONS: dict[str | int, tuple[str, str]] = {
    "path": ("rewards.py", "score"),
    "advantage_function": ("own.py", "advantage"),
    "loss_function": ("own.py", "loss"),
}
_WORDS = {"greater_than": "above", "greater_than_equal": "of at least"}
_WORDS |= {"less_than": "below", "less_than_equal": "of at most"}


def hint_for(kind: str, path: Path, bound: Any, raw: dict[str, Any]) -> str:
    """What to do about pydantic's finding `kind` at `path`; `bound` is the limit that was broken, if it is one."""
    field = _field(path, raw)
    if kind in ("dict_type", "model_type", "model_attributes_type", "dataclass_type"):
        return _as_table(path, raw)
    if kind == "tuple_type" and tables_at(path, raw) and isinstance(value_at(path, raw), dict):
        first = next(iter(kinds_of(tables_at(path, raw)[0])), "")
        return f"write [[{dotted(path)}]], once for each; with --set '{dotted(path)}=[{{ kind = \"{first}\" }}]'"
    if kind == "union_tag_invalid" and isinstance(path[-1], int):
        return "write one of them, or remove the entry"
    if kind == "string_pattern_mismatch" and path[-1] in _FUNCTIONS:
        given, (file, name) = value_at(path, raw), _FUNCTIONS[path[-1]]
        return (
            f'write "{given}:{name}", or whatever the function is called'
            if str(given).endswith(".py")
            else f'write the path of a Python file, a colon and the name of a function in it: "{file}:{name}"'
        )
    if kind == "string_pattern_mismatch" and (cleaned := _clean(value_at(path, raw))):
        return f'write "{cleaned}"'
    leave_out = _leave_out(field)
    if kind in _WORDS:
        number = _whole(kind, bound) if _is_whole(bound) else ""
        return f"{number or f'use a number {_WORDS[kind]} {bound:g}'}{f', or {leave_out}' if leave_out else ''}"
    if leave_out:
        return leave_out
    return _meaning(field, path)


def _field(path: Path, raw: dict[str, Any]) -> FieldInfo | None:
    """The schema's field at `path`; of a list entry, that of its list."""
    while path and isinstance(path[-1], int):
        path = path[:-1]
    if not path:
        return None
    parent, name = path[:-1], path[-1]
    for table in chosen_tables(tables_at(parent, raw), value_at(parent, raw)):
        for own, field in table.model_fields.items():
            if name in (own, field.alias):
                return field
    return None


def _clean(name: Any) -> str:
    """The nearest name that may be a folder's, or ""."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._") if isinstance(name, str) and ":" not in name else ""


def _is_whole(bound: Any) -> bool:
    return isinstance(bound, int) and not isinstance(bound, bool)


def _whole(kind: str, bound: int) -> str:
    nearest = bound + {"greater_than": 1, "less_than": -1}.get(kind, 0)
    return f"use {nearest} or {'more' if kind.startswith('greater') else 'less'}"


def _leave_out(field: FieldInfo | None) -> str:
    if field is None or field.default is PydanticUndefined:
        return ""
    if field.default is None:
        return "leave the key out"
    shown = show_default(field.default)
    return f"leave it out for the default, {shown}" if shown else "leave the key out"


def _meaning(field: FieldInfo | None, path: Path) -> str:
    """The key's meaning: the first sentence of its description."""
    if field is None or not field.description:
        return f"{page('spec.md')} says what {dotted(path)} takes"
    return f"{dotted(path)} is: {field.description.split('. ')[0].rstrip('.')}"


def _as_table(path: Path, raw: dict[str, Any]) -> str:
    tables = tables_at(path, raw)
    given, key = value_at(path, raw), dotted(path)
    if tables and kinds_of(tables[0]):
        known = [kind for table in tables for kind in kinds_of(table)]
        return f'write {{ kind = "{given if given in known else known[0]}" }}'
    if isinstance(path[-1], int) or not tables:
        return "write { key = value } in place of it"
    needed = [name for name, field in tables[0].model_fields.items() if field.is_required()]
    return f"write [{key}] on a line of its own and its keys below{': ' + ', '.join(needed) if needed else ''}"
