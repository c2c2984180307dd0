"""Pydantic's findings in plain words: each a `Problem` with dotted key, value, what is wrong, and what to do."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from specs.errors import Problem
from specs.load.dotted_keys import value_at
from specs.load.keys import Path, chosen_tables, closest, dotted, engine_family, kind_of, kinds_of, tables_at
from specs.load.toml_file import NO_TOML_NUMBER
from specs.load.unknown_keys import foreign_kind_hint, unknown_keys
from specs.packages import page
from specs.schema.engines.foreign import foreign_kinds
from specs.schema.environment import FORMS
from specs.schema.objectives import objective_kind
from specs.schema.roles import ROLES
from specs.schema.table import Table, meaning_of
from specs.text import show, show_default

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

_TABLE = "a table"
TYPES = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "string_type": "text",
    "bool_type": "true or false",
    "tuple_type": "a list",
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type", "dataclass_type"), _TABLE),
}
TYPE_NAMES = {bool: "true or false", int: "a whole number", float: "a number with a point", str: "text"}
TYPE_NAMES |= {list: "a list", tuple: "a list", dict: _TABLE}
# pydantic's finding → what is wrong, from the context that comes with it
MESSAGES = {
    "greater_than": "must be greater than {gt:.10g}",
    "greater_than_equal": "must be at least {ge:.10g}",
    "less_than": "must be less than {lt:.10g}",
    "less_than_equal": "must be at most {le:.10g}",
    "finite_number": "must be a finite number",
    "string_too_short": "must not be empty",
    "too_short": "needs {min_length} or more entries",
    "too_long": "takes at most {max_length} entries",
}
PATTERNS = {  # by the pattern, or by the key
    "^[A-Za-z0-9_-]+$": "letters, digits, dashes and underscores",
    "name": "letters, digits, dots, dashes and underscores, beginning with a letter or digit",
    **dict.fromkeys(("path", "agent", "reward", "advantage_function", "loss_function"), "the form file.py:name"),
}


def explain(errors: Sequence[ErrorDetails], raw: dict[str, Any]) -> list[Problem]:
    """Return a problem, each with a hint, for every finding, in the order of the spec's sections."""
    places = {other["loc"][:depth] for other in errors for depth in range(len(other["loc"]))}
    # A list whose entries are broken is called too short for that.
    own = [error for error in errors if error["type"] != "too_short" or error["loc"] not in places]
    return [problem for error in own for problem in _problems(error, raw)]


def _problems(error: ErrorDetails, raw: dict[str, Any]) -> list[Problem]:
    kind, given, context = error["type"], error["input"], error.get("ctx", {})
    path = without_tags(error["loc"], raw)
    if kind == "extra_forbidden":
        return unknown_keys(path, raw)
    if kind == "missing":
        return [_missing(path, raw)]
    if kind == "union_tag_not_found":
        return _missing_kind(path, raw)
    if kind in ("literal_error", "union_tag_invalid"):
        return [_not_a_choice(path, given, str(context.get("expected") or context.get("expected_tags")), raw)]
    hint = str(context.get("hint", ""))
    if kind in TYPES:
        message = f"must be {TYPES[kind]}, not {TYPE_NAMES.get(type(given), 'a date or time')}"
        hint = _write_it(path, given, TYPES[kind], raw)
    elif kind == "string_pattern_mismatch":
        pattern = context["pattern"]
        message = f"must be {PATTERNS.get(pattern) or PATTERNS.get(str(path[-1])) or pattern}"
    else:
        message = MESSAGES[kind].format(**context) if kind in MESSAGES else error["msg"]
    return [Problem(dotted(path), message, hint or _default_or_meaning(path, raw), show(given))]


def without_tags(loc: Path, raw: Any) -> Path:
    """Return the key of the spec: pydantic puts the chosen `kind` into the path of an error."""
    path: list[str | int] = []
    node, tagged = raw, False  # a kind may be called as one of its keys is
    for part in loc:
        is_kind = isinstance(node, dict) and not tagged and part == objective_kind(node)
        if part in FORMS or (is_kind and len(tables_at(path, raw)) > 1):
            tagged = True
            continue
        path.append(part)
        node, tagged = value_at(node, (part,)), False
    return tuple(path)


def _missing(path: Path, raw: dict[str, Any]) -> Problem:
    *parents, name = path
    if path == ("schema",):
        return Problem("schema", "missing", "add `schema = 1` as the first line")
    if not parents:
        needed = ", ".join(_required(tables_at(path, raw)))
        return Problem(f"[{name}]", "this section is missing", f"add [{name}] with {needed}")
    if isinstance(name, int):
        return Problem(dotted(parents), f"needs {name + 1} entries", f"write {name + 1} values in brackets")
    entry = parents[-1]
    where = (
        f"to entry {entry + 1} of {dotted(parents[:-1])}" if isinstance(entry, int) else f"under [{dotted(parents)}]"
    )
    return Problem(dotted(path), "missing", f"add `{name} = …` {where}")


def _missing_kind(path: Path, raw: dict[str, Any]) -> list[Problem]:
    """Name the kinds, and what every kind requires besides."""
    tables, given = tables_at(path, raw), value_at(raw, path)
    kinds = " or ".join(show(kind_of(table)) for table in tables)
    besides = [name for name in _required(tables) if name != "kind" and name not in given]
    missing = Problem(dotted((*path, "kind")), "missing", f"add kind = {kinds}")
    return [missing, *(_missing((*path, name), raw) for name in besides)]


def _required(tables: Sequence[type[Table]]) -> list[str]:
    """Return the keys that each of these tables requires."""
    needed = [[name for name, field in table.model_fields.items() if field.is_required()] for table in tables]
    return [name for name in needed[0] if all(name in others for others in needed)]


def _not_a_choice(path: Path, given: Any, expected: str, raw: dict[str, Any]) -> Problem:
    known = re.findall(r"'([^']*)'", expected) or [expected]
    if not isinstance(given, dict):
        near = closest(str(given), known)
        foreign = foreign_kind_hint(given) if path[-1] == "kind" else ""
        hint = f'did you mean "{near}"?' if near else foreign or _default_or_meaning(path, raw)
        return Problem(dotted(path), f"not a choice; known: {', '.join(known)}", hint, show(given))
    family, kind = engine_family(tables_at(path, raw)), given.get("kind")
    known += foreign_kinds(family) if family else []
    models = [role for role in ROLES.values() if family and role.holds_model]
    others = [role.name for role in models if role.is_trainer != (family == "train")]
    hint = foreign_kind_hint(kind)
    if not hint and (near := closest(str(kind), known)):
        hint = f'did you mean "{near}"?'
    elif not hint and others and any(kind in kinds_of(table) for table in tables_at((others[0], "engine"), {})):
        hint = f"{kind} is an engine of {', '.join(others)}"
    message = f"unknown kind; known: {', '.join(known)}"
    return Problem(dotted((*path, "kind")), message, hint or "write one of them", show(kind))


def _write_it(path: Path, given: Any, wanted: str, raw: dict[str, Any]) -> str:
    """Return how the value is written where another type was meant for certain; "" where it is not certain."""
    if wanted == _TABLE:
        return _as_table(path, raw)
    if isinstance(given, dict):
        return f"write [[{dotted(path)}]], once for each" if wanted == "a list" else f"write `{dotted(path)} = …`"
    if wanted == "a list":
        numbers = isinstance(given, str) and re.fullmatch(r"\d+(\s*,\s*\d+)*", given.strip())
        return f"write it in brackets: [{given.strip() if numbers else show(given)}]"
    if wanted == "text" and not isinstance(given, list | tuple):
        return f"""write it in quotes: "{show(given)}", and with --set in two pairs: '"{show(given)}"'"""
    if wanted == "a whole number" and isinstance(given, float) and given.is_integer():
        return f"write {int(given)}"
    plain = r"true|false" if wanted == "true or false" else r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?"
    if not isinstance(given, str) or not re.fullmatch(plain, given):
        return ""
    return f"write {float(given):.10g}" if re.match(NO_TOML_NUMBER, given) else "write it without quotes"


def _as_table(path: Path, raw: dict[str, Any]) -> str:
    tables, given = tables_at(path, raw), value_at(raw, path)
    if known := [kind for table in tables for kind in kinds_of(table)]:
        return f'write {{ kind = "{given if given in known else known[0]}" }}'
    if isinstance(path[-1], int) or not tables:
        return "write { key = value } instead"
    needed = ", ".join(_required(tables[:1]))
    return f"write [{dotted(path)}] on a line of its own and its keys below" + (f": {needed}" if needed else "")


def _default_or_meaning(path: Path, raw: dict[str, Any]) -> str:
    """Return what a key is without the line, else the first sentence of its description."""
    while isinstance(path[-1], int):
        path = path[:-1]
    tables = chosen_tables(tables_at(path[:-1], raw), value_at(raw, path[:-1]))
    found = [(t, name) for t in tables for name, field in t.model_fields.items() if path[-1] in (name, field.alias)]
    if not found:
        return f"{page('spec.md')} says what {dotted(path)} takes"
    table, name = found[0]
    if not (field := table.model_fields[name]).is_required():
        default = show_default(field.default)
        return f"leave it out for the default, {default}" if default else "leave the key out"
    meaning = meaning_of(table, name).split(". ")[0].rstrip(".")
    return f"{dotted(path)} is: {meaning}" if meaning else "write one of them"
