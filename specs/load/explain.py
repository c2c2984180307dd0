"""pydantic's findings in plain words: each a `Problem` with dotted key, value, what is wrong, and what to do."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from specs.errors import Problem
from specs.load.hints import hint_for
from specs.load.keys import (
    Path,
    closest,
    dotted,
    engine_family,
    kind_of,
    kinds_of,
    tables_at,
    value_at,
)
from specs.load.synonyms import NOT_YET_KINDS
from specs.load.unknown_keys import unknown_keys
from specs.schema.engines.foreign import foreign_kinds
from specs.schema.roles import ROLES
from specs.schema.table import Table
from specs.text import show

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

TYPES = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "string_type": "text",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "dict_type": "a table",
    "model_type": "a table",
    "model_attributes_type": "a table",
    "dataclass_type": "a table",
}
BOUNDS = {
    "greater_than": ("gt", "must be greater than"),
    "greater_than_equal": ("ge", "must be at least"),
    "less_than": ("lt", "must be less than"),
    "less_than_equal": ("le", "must be at most"),
}
PATTERNS = {
    "run.name": "letters, digits, dots, dashes and underscores, beginning with a letter or digit",
    "name": "letters, digits, dashes and underscores",
    **dict.fromkeys(("path", "advantage_function", "loss_function"), "the form file.py:name"),
}


def explain(errors: list[ErrorDetails], raw: dict[str, Any]) -> list[Problem]:
    """One problem per finding, each with a hint, in the order of the spec's sections."""
    found = [error for error in errors if not _echo(error, errors)]
    return [problem for error in found for problem in _problems(error, raw)]


def _problems(error: ErrorDetails, raw: dict[str, Any]) -> list[Problem]:
    """The finding; where `kind` is missing, also the keys that every kind requires."""
    if error["type"] == "extra_forbidden":
        return unknown_keys(without_tags(error["loc"], raw), raw)
    said = [_with_hint(_explain_one(error, raw), error, raw)]
    if error["type"] == "union_tag_not_found":
        path = without_tags(error["loc"], raw)
        wanted = [name for name in _needed_keys(tables_at(path, raw)) if name not in value_at(path, raw)]
        said += [_missing((*path, name)) for name in wanted if name != "kind"]
    return said


def _with_hint(problem: Problem, error: ErrorDetails, raw: dict[str, Any]) -> Problem:
    if problem.hint:
        return problem
    kind, context = error["type"], error.get("ctx", {})
    bound = context.get(BOUNDS[kind][0]) if kind in BOUNDS else None
    return replace(problem, hint=hint_for(kind, without_tags(error["loc"], raw), bound, raw))


def _echo(error: ErrorDetails, errors: list[ErrorDetails]) -> bool:
    """A list whose entries are broken is also called too short; only the entries are news."""
    place = error["loc"]
    return error["type"] == "too_short" and any(
        other["loc"][: len(place)] == place for other in errors if other is not error
    )


def _explain_one(error: ErrorDetails, raw: dict[str, Any]) -> Problem:
    kind, context = error["type"], error.get("ctx", {})
    path = without_tags(error["loc"], raw)
    key, value = dotted(path), show(error["input"])
    if kind == "missing":
        return _missing(path)
    if kind in TYPES:
        return _wrong_type(key, error["input"], TYPES[kind])
    if kind in BOUNDS:
        name, words = BOUNDS[kind]
        bound = f"{context[name]:g}" if isinstance(context[name], float) else context[name]
        return Problem(key, f"{words} {bound}", value=value)
    if kind in ("literal_error", "union_tag_invalid"):
        return _not_one_of(path, error["input"], str(context.get("expected") or context.get("expected_tags")), raw)
    if kind == "union_tag_not_found":
        kinds = [kind_of(table) for table in tables_at(path, raw)]
        return Problem(f"{key}.kind", "missing", f"add kind = {' or '.join(show(name) for name in kinds)}")
    if kind in ("string_too_short", "too_short", "too_long"):
        return _wrong_length(key, kind, value, context)
    if kind == "string_pattern_mismatch":
        form = PATTERNS.get(key) or PATTERNS.get(str(path[-1])) or str(context["pattern"])
        return Problem(key, f"must be {form}", value=value)
    if kind == "finite_number":
        return Problem(key, "must be a finite number", value=value)
    return Problem(key, error["msg"], str(context.get("hint", "")), value)


def without_tags(loc: Path, raw: Any) -> Path:
    """pydantic puts the chosen `kind` into the path of an error; the spec's own key has no such part."""
    path: list[str | int] = []
    node = raw
    for part in loc:
        if isinstance(node, dict) and part not in node and part == node.get("kind"):
            continue
        path.append(part)
        node = value_at((part,), node)
    return tuple(path)


def _missing(path: Path) -> Problem:
    key = dotted(path)
    if len(path) == 1:
        if path[0] == "schema":
            return Problem(key, "missing", "add `schema = 1` as the first line")
        return Problem(f"[{key}]", "this section is missing", _needed(key))
    section, name = dotted(path[:-1]), path[-1]
    if isinstance(name, int):
        return Problem(section, f"needs {name + 1} entries at least")
    entry = path[-2]
    where = f"to entry {entry + 1} of {dotted(path[:-2])}" if isinstance(entry, int) else f"under [{section}]"
    return Problem(key, "missing", f"add `{name} = …` {where}")


def _needed(section: str) -> str:
    return f"add [{section}] with {', '.join(_needed_keys(tables_at((section,), {})))}"


def _needed_keys(tables: Sequence[type[Table]]) -> list[str]:
    """Keys that are required in each of these tables."""
    needed = [[name for name, field in table.model_fields.items() if field.is_required()] for table in tables]
    return [name for name in needed[0] if all(name in others for others in needed)]


def _wrong_type(key: str, given: Any, wanted: str) -> Problem:
    hint = ""
    if isinstance(given, str) and wanted in ("a whole number", "a number", "true or false"):
        hint = "write it without quotes" if _reads_as(given, wanted) else ""
        if not hint and "," in given and all(_reads_as(one.strip(), wanted) for one in given.split(",")):
            hint = f"write one value; `rlctl sweep SPEC --set {key}={given}` does a run for each"
    elif wanted == "text" and isinstance(given, bool | int | float):
        hint = f"write it in quotes: {show(str(given).lower() if isinstance(given, bool) else str(given))}"
    elif wanted == "a list" and not isinstance(given, dict):
        numbers = isinstance(given, str) and re.fullmatch(r"\d+(\s*,\s*\d+)*", given.strip())
        inside = ", ".join(re.findall(r"\d+", given)) if numbers else show(given)
        hint = f"write it in brackets: [{inside}]"
    elif wanted == "a whole number" and isinstance(given, float) and given.is_integer():
        hint = f"write {int(given)}"
    return Problem(key, f"must be {wanted}, not {_type_name(given)}", hint, show(given))


def _reads_as(text: str, wanted: str) -> bool:
    if wanted == "true or false":
        return text in ("true", "false")
    return (
        re.fullmatch(r"[+-]?\d+" if wanted == "a whole number" else r"[+-]?\d+(\.\d*)?([eE][+-]?\d+)?", text)
        is not None
    )


def _type_name(value: Any) -> str:
    names = {bool: "true or false", int: "a whole number", float: "a number with a point", str: "text"}
    names |= {list: "a list", tuple: "a list", dict: "a table"}
    return names.get(type(value), "a date or time")


def _not_one_of(path: Path, given: Any, expected: str, raw: dict[str, Any]) -> Problem:
    known = re.findall(r"'([^']*)'", expected) or [expected]
    by_kind = isinstance(given, dict)
    family = engine_family(tables_at(path, raw)) if by_kind else None
    if family:
        known += foreign_kinds(family)
    key = dotted((*path, "kind")) if by_kind else dotted(path)
    wrong = given.get("kind") if by_kind else given
    near = closest(str(wrong), known)
    what = "unknown kind" if key.endswith("kind") else "not a choice"
    hint = f'did you mean "{near}"?' if near else _other_family(path, wrong, family)
    if wrong in NOT_YET_KINDS:
        hint = f"{wrong} is not in rlctl yet"
    return Problem(key, f"{what}; known: {', '.join(known)}", hint, show(wrong))


def _other_family(path: Path, wrong: Any, family: str | None) -> str:
    """The hint for an engine that belongs to the other kind of role."""
    if family is None or not isinstance(wrong, str):
        return ""
    homes = [role.name for role in ROLES.values() if role.engine_family not in (None, family)]
    if any(wrong in kinds_of(table) for table in tables_at((homes[0], "engine"), {})):
        return f"{wrong} is an engine of {' and '.join(homes)}"
    return ""


def _wrong_length(key: str, kind: str, value: str, context: dict[str, Any]) -> Problem:
    if kind == "string_too_short":
        return Problem(key, "must not be empty", value=value)
    if kind == "too_short":
        return Problem(key, f"needs at least {context['min_length']} {_entries(context['min_length'])}", value=value)
    return Problem(key, f"takes at most {context['max_length']} {_entries(context['max_length'])}", value=value)


def _entries(count: int) -> str:
    return "entry" if count == 1 else "entries"
