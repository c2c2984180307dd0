"""Code that a model folder brings (`auto_map` in `config.json`): whether its files are there and define the classes.

The files are parsed, never run.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_WHOLE = "copy the whole model, its .py files too"
Wrong = tuple[str, str]  # what is wrong, and a hint


def code_problems(folder: Path, config: Mapping[str, Any], *, native: bool) -> Iterator[Wrong]:
    """What is wrong with the code of a model that may run its own. `native`: transformers has a class for its type."""
    named = config.get("auto_map") or {}
    classes: dict[str, list[str]] = {}  # module → classes that it must define
    for role in ("AutoConfig", "AutoModelForCausalLM"):
        reference = named.get(role)
        if reference is None:
            if named and not native:
                yield (
                    f"auto_map in config.json names no {role}",
                    "name a causal language model that brings all of its code",
                )
        elif not isinstance(reference, str) or reference.count(".") != 1:
            yield f"{role} in auto_map of config.json must be file.Class, not {reference!r}", _WHOLE
        elif "--" not in reference:  # else the file is another repository's
            module, name = reference.split(".")
            classes.setdefault(module, []).append(name)
    if missing := [f"{module}.py" for module in classes if not (folder / f"{module}.py").is_file()]:
        yield f"needs {', '.join(missing)} (auto_map in config.json), which the folder lacks", _WHOLE
    for module, names in classes.items():
        if f"{module}.py" not in missing:
            yield from _file(folder / f"{module}.py", names)


def _file(file: Path, names: list[str]) -> Iterator[Wrong]:
    try:
        tree = ast.parse(file.read_bytes(), file.name)
    except SyntaxError as error:
        yield f"{file.name}:{error.lineno}: {error.msg}", _WHOLE
        return
    except (ValueError, OSError) as error:
        yield f"{file.name} cannot be read: {error}", _WHOLE
        return
    if absent := [name for name in names if name not in _defined(tree)]:
        yield f"{file.name} defines no {', '.join(absent)}, which auto_map in config.json names", _WHOLE
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module:
            other = file.parent.joinpath(*node.module.split("."))
            if not other.with_suffix(".py").is_file() and not other.is_dir():
                yield f"{file.name}:{node.lineno} imports {node.module}.py, which the folder lacks", _WHOLE


def _defined(tree: ast.Module) -> set[str]:
    """Names that the module binds anywhere."""
    names = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    names |= {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    return names | {
        node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
