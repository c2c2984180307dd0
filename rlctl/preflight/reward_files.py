"""Reward functions that a spec names, as far as they can be graded without running them: the file is only parsed.

`rlctl check-config` calls them too, in a process of their own (`rlctl/check/reward_calls.py`).
"""

from __future__ import annotations

import ast
import os
from pathlib import Path

from rlctl.models.paths import not_found
from specs.errors import Problem
from specs.load.keys import closest
from specs.schema.rewards import Function
from specs.schema.spec import Spec
from specs.text import show
from workers.grading.reward_sources import reward_sources

OUR_PACKAGES = ("rlctl", "specs", "workers", "backends")


def reward_problems(spec: Spec, spec_dir: Path) -> list[Problem]:
    """What is wrong with the files of the terms."""
    problems = []
    for index, term in enumerate(spec.reward.terms):
        if isinstance(term, Function) and (found := _function(term.path, spec_dir)):
            problems.append(_problem(f"reward.terms.{index}.path", term.path, spec_dir, found))
    return problems


def _problem(key: str, path: str, spec_dir: Path, said: tuple[str, str]) -> Problem:
    place = path.rpartition(":")[0]
    file = spec_dir / Path(place).expanduser()
    if file.exists() or file.is_symlink():
        return Problem(key, *said, show(path))
    return not_found(key, said[0], place, show(path))


def _no_file(file: Path) -> tuple[str, str] | None:
    if file.is_symlink() and not file.exists():
        return f"a symbolic link to {os.readlink(file)}, which does not exist", "repair the link"
    if file.is_dir():
        return f"{file} is a folder", "name a Python file in it"
    if not file.is_file():
        return f"no such file ({os.path.abspath(file)})", ""
    return None


def _shadowed(file: Path) -> tuple[str, str] | None:
    """A module beside a reward file that it imports by the name of a package of ours, which is imported instead."""
    for source in reward_sources(file)[1:]:
        name = source.relative_to(file.parent).parts[0].removesuffix(".py")
        if name in OUR_PACKAGES:
            return f"imports {name}, and gets rlctl's own package of that name, not {source}", f"rename {source.name}"
    return None


def _function(path: str, spec_dir: Path) -> tuple[str, str] | None:
    """What is wrong with `file.py:name`, and a hint."""
    name = path.rpartition(":")[2]
    file = spec_dir / Path(path.rpartition(":")[0]).expanduser()
    if found := _no_file(file):
        return found
    if shadowed := _shadowed(file):
        return shadowed
    try:
        tree = ast.parse(file.read_bytes(), str(file))
    except SyntaxError as error:
        return f"{file.name}:{error.lineno}: {error.msg}", "repair the file"
    except (OSError, ValueError) as error:
        return f"cannot be read: {error}", "make it a readable Python file"
    names = _top_level_names(tree)
    if name not in names:
        near = closest(name, [known for known in names if known])
        return (
            f"{file.name} defines no {name}",
            f"did you mean `{near}`?" if near else f"write def {name}(prompt, completion, row) in it",
        )
    return (f"{name} is async", "write a plain function") if isinstance(names[name], ast.AsyncFunctionDef) else None


def own_function_problems(spec: Spec, spec_dir: Path) -> list[Problem]:
    """What is wrong with the files of the user's own advantage and loss."""
    problems = []
    for key, path in spec.algorithm.own_functions.items():
        file, name = spec_dir / Path(path.rpartition(":")[0]).expanduser(), path.rpartition(":")[2]
        if found := _no_file(file) or _undefined(file, name):
            problems.append(_problem(f"algorithm.{key}", path, spec_dir, found))
    return problems


def _undefined(file: Path, name: str) -> tuple[str, str] | None:
    try:
        names = _top_level_names(ast.parse(file.read_bytes(), str(file)))
    except SyntaxError as error:
        return f"{file.name}:{error.lineno}: {error.msg}", "repair the file"
    except (OSError, ValueError) as error:
        return f"cannot be read: {error}", "make it a readable Python file"
    if name in names:
        return None
    near = closest(name, [known for known in names if known])
    return f"{file.name} defines no {name}", f"did you mean `{near}`?" if near else f"write def {name}(…) in it"


def _top_level_names(tree: ast.Module) -> dict[str, ast.AST]:
    """Names that the module binds, also inside `if` and `try`."""
    names: dict[str, ast.AST] = {}
    scopes: list[ast.AST] = list(tree.body)
    while scopes:
        node = scopes.pop(0)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names[node.name] = node
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name: node for alias in node.names}
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names[node.id] = node
        scopes += list(ast.iter_child_nodes(node))
    return names
