"""`--set a.b=c`: changes to a spec's raw TOML tables before anything is validated."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import tomli
from pydantic_core import PydanticCustomError

from specs.errors import Problem, UsageError
from specs.load.dotted_keys import value_at
from specs.load.keys import Path, chosen_tables, dotted, tables_at
from specs.load.toml_file import dumped, written
from specs.schema.recipes import spec_class
from specs.schema.roles import ROLES
from specs.schema.table import Table
from specs.terminal import visible
from specs.text import show


def apply_overrides(raw: dict[str, Any], overrides: Sequence[str]) -> tuple[list[Problem], list[str]]:
    """Change `raw` in place, in order. Return what could not be applied, and notes on keys of the file that go unused
    because another `kind` was set; the schema finds unknown keys later."""
    _fill_engine_kinds(raw)
    file, problems, paths = copy.deepcopy(raw) if overrides else raw, [], []
    for text in overrides:
        key, equals, value = text.partition("=")
        parts = _parts(key)
        if not equals or not all(parts):
            problems.append(Problem(f"--set {text}", "not of the form key=value", "write e.g. --set run.steps=10"))
            continue
        try:
            paths.append(_assign(raw, parts, parse_value(value)))
        except KeyError as error:
            message, hint = error.args
            problems.append(Problem(f"--set {text}", message, hint))
    _fill_engine_kinds(raw)
    tables = dict.fromkeys(path[:-1] for path in paths if path[-1] == "kind")
    return problems, [found for table in tables if (found := _drop_keys_of_old_kind(table, file, raw, paths))]


def parse_value(text: str) -> Any:
    """Return a TOML value where `text` is one, else `text`: `3` is a number, `[1, 2]` a list, `cosine` a string."""
    try:
        parsed = tomli.loads(f"value = {text.strip()}")
    except tomli.TOMLDecodeError:
        return text
    return parsed["value"] if parsed.keys() == {"value"} else text


def _parts(key: str) -> list[str]:
    """Return the names in a dotted key, which may stand in quotes as TOML's do."""
    node: Any
    try:
        node, parts = tomli.loads(f"{key} = 0"), list[str]()
    except tomli.TOMLDecodeError:
        return [part.strip() for part in key.split(".")]
    while isinstance(node, dict):
        name, node = next(iter(node.items()), ("", 0))
        parts.append(name)
    return parts


def _assign(raw: dict[str, Any], parts: Sequence[str], value: Any) -> Path:
    """Set a key and return its path. Raises KeyError with message and hint."""
    path: Path = ()
    node: Any = raw
    for depth, part in enumerate(parts):
        name: str | int = part
        if isinstance(node, list):
            if not (part.isascii() and part.isdecimal() and int(part) < len(node)):
                here = dotted(path)
                hint = f"write {here}.0 to {here}.{len(node) - 1}" if node else f"set {here} as a whole"
                raise KeyError(f"{here} is a list of {len(node)}; it has no entry {part!r}", hint)
            name = int(part)
        elif not isinstance(node, dict):
            raise KeyError(f"{dotted(path)} holds a value, not a table", f"--set {dotted(path)}=VALUE changes it")
        path = (*path, name)
        if depth == len(parts) - 1:
            node[name] = value
        elif isinstance(node, dict):
            node = node.setdefault(part, {})
        else:
            node = node[name]
    return path


def _fill_engine_kinds(raw: dict[str, Any]) -> None:
    """Fill in the role's default engine where an engine table has no `kind`."""
    recipe = spec_class(raw)
    for role in ROLES.values():
        section = raw.get(role.name) if role.holds_model and role.name in recipe.model_fields else None
        if isinstance(section, dict) and isinstance(section.get("engine"), dict):
            default = recipe.section_class(role.name).model_fields["engine"].default
            section["engine"].setdefault("kind", default.kind)


def _drop_keys_of_old_kind(path: Path, file: dict[str, Any], raw: dict[str, Any], set_paths: Sequence[Path]) -> str:
    """Take out of the table at `path` of `raw` what `file` wrote for a kind that is not chosen any more; return a note.

    A kind has keys and defaults of its own, so a key of the file stays only where the new kind has it with the same
    default. What `--set` itself sets always stays."""
    before, after = value_at(file, path), value_at(raw, path)
    if path in set_paths or not isinstance(before, dict) or not isinstance(after, dict):
        return ""
    old, new = (_table_of(path, raw, node) for node in (before, after))
    if old is None or new is None or old is new:
        return ""
    kept = {other[len(path)] for other in set_paths if other[: len(path)] == path and len(other) > len(path)}
    keys = {name: value for name, value in before.items() if name not in kept and _differs(name, old, new)}
    for name in keys:
        del after[name]
    listed = ", ".join(f"{name} = {show(value)}" for name, value in keys.items())
    kinds = f"{show(after['kind'])}: not used of the file, which wrote it for kind {show(before['kind'])}"
    return f"{dotted(path)}.kind = {kinds}: {listed}" if keys else ""


def _table_of(path: Path, raw: dict[str, Any], node: dict[str, Any]) -> type[Table] | None:
    """Return the table of the kind that `node` names; None where there is none, or it is another package's and broken,
    which is said when the spec is read."""
    try:
        tables = chosen_tables(tables_at(path, raw), node)
    except PydanticCustomError:
        return None
    return tables[0] if len(tables) == 1 else None


def _differs(name: str, old: type[Table], new: type[Table]) -> bool:
    """Tell whether `name`, a key of the old kind, is none of the new one, or has another default there."""
    fields = (old.model_fields.get(name), new.model_fields.get(name))
    if fields[0] is None or name == "kind":
        return False
    return fields[1] is None or fields[0].default != fields[1].default


def assignments(overrides: Mapping[str, Any]) -> list[str]:
    """Return values of Python as `--set`s: `run__steps=10` is `run.steps=10`. Raises UsageError for what TOML cannot
    hold."""
    found = []
    for name, value in overrides.items():
        try:
            found.append(f"{name.replace('__', '.')}={written(value)}")
        except TypeError as error:
            hint = "give text, a number, true or false, a list or a dict; leave a key out for its default"
            raise UsageError(f"{name}: {error}", hint=hint) from None
    return found


def as_run(text: str, overrides: Sequence[str]) -> str:
    """Return the TOML text of the spec that `text` and valid `overrides` make together, as a run directory keeps it:
    `text` where they change nothing, else its tables without comments, below the overrides."""
    before, wanted = tomli.loads(text), tomli.loads(text)
    apply_overrides(before, ())
    apply_overrides(wanted, overrides)
    changed = dumped(wanted)
    if changed == dumped(before):  # as text: to Python true is 1
        return text
    listed = "".join(f"# --set {visible(line)}\n" for override in overrides for line in override.splitlines())
    return f"{listed}\n{changed}"
