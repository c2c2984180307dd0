"""`--set a.b=c`: changes to a spec's raw TOML tables before anything is validated."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

import tomli

from specs.errors import Problem, UsageError
from specs.load.keys import Path
from specs.load.kind_change import Dropped, drop_keys_of_old_kinds
from specs.load.toml_text import written
from specs.schema.roles import ROLES
from specs.schema.spec import Spec


def apply_overrides(raw: dict[str, Any], overrides: Sequence[str]) -> tuple[list[Problem], list[Dropped]]:
    """Change `raw` in place, in order. Returns what could not be applied, and the keys of the file that went because
    another `kind` was set; the schema finds unknown keys later."""
    fill_engine_kinds(raw)
    file, problems, paths = copy.deepcopy(raw) if overrides else raw, [], []
    for text in overrides:
        key, equals, value = text.partition("=")
        key = key.strip()
        if not equals or not key or not all(part.strip() for part in key.split(".")):
            problems.append(Problem(f"--set {text}", "not of the form key=value", "write e.g. --set run.steps=10"))
            continue
        parts = [part.strip() for part in key.split(".")]
        problem = _assign(raw, parts, parse_value(value), text)
        if problem:
            problems.append(problem)
        else:
            paths.append(_path(raw, parts))
    fill_engine_kinds(raw)
    return problems, drop_keys_of_old_kinds(file, raw, paths)


def assignments(overrides: Mapping[str, Any]) -> list[str]:
    """Values of Python as `--set`s: `run__steps=10` is `run.steps=10`. Raises UsageError for what TOML cannot say."""
    return [f"{name.replace('__', '.')}={written(_plain(value, name))}" for name, value in overrides.items()]


def _plain(value: Any, name: str) -> Any:
    """The value, of what TOML has alone."""
    if isinstance(value, Mapping):
        return {str(key): _plain(one, name) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one, name) for one in value]
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, str | bool | int | float):
        return value
    raise UsageError(
        f"{name}: {type(value).__name__} is nothing that a spec can hold",
        hint="give text, a number, true or false, a list or a dict; leave a key out for its default",
    )


def _path(raw: dict[str, Any], parts: Sequence[str]) -> Path:
    """As the schema's tools take it: numbers where a list is."""
    path: list[str | int] = []
    node: Any = raw
    for part in parts:
        path.append(int(part) if isinstance(node, list) else part)
        node = node[path[-1]]
    return tuple(path)


def parse_value(text: str) -> Any:
    """A TOML value where `text` is one, else `text` itself: `3` is a number, `[1, 2]` a list, `cosine` a string."""
    try:
        parsed = tomli.loads(f"value = {text.strip()}")
    except tomli.TOMLDecodeError:
        return text
    return parsed["value"] if parsed.keys() == {"value"} else text


def _assign(raw: dict[str, Any], parts: list[str], value: Any, text: str) -> Problem | None:
    node: Any = raw
    for depth, part in enumerate(parts):
        last = depth == len(parts) - 1
        here = ".".join(parts[:depth])
        if isinstance(node, list):
            if not re.fullmatch("[0-9]+", part) or int(part) >= len(node):
                hint = f"write {here}.0 to {here}.{len(node) - 1}" if node else f"set {here} as a whole"
                return Problem(f"--set {text}", f"{here} is a list of {len(node)}; it has no entry {part!r}", hint)
            if last:
                node[int(part)] = value
            else:
                node = node[int(part)]
        elif isinstance(node, dict):
            if last:
                node[part] = value
            else:
                node = node.setdefault(part, {})
        else:
            return Problem(f"--set {text}", f"{here} holds a value, not a table", f"--set {here}=VALUE changes it")
    return None


def fill_engine_kinds(raw: dict[str, Any]) -> None:
    """An engine table without `kind` means the role's default engine, as a missing engine table does."""
    for role in ROLES.values():
        section = raw.get(role.name)
        if role.holds_model and isinstance(section, dict) and isinstance(section.get("engine"), dict):
            section["engine"].setdefault("kind", Spec.section_class(role.name).model_fields["engine"].default.kind)
