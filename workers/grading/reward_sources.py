"""Find the files that a reward module consists of, without running it."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path


def reward_sources(file: Path) -> list[Path]:
    """Return a reward file and the Python files of its own folder that it imports, by statements anywhere in it and in
    them; of a package all its files. What is imported by a computed name, installed packages and data that the code
    opens are not found. A file that cannot be parsed counts alone."""
    found = [file]
    for source in found:
        for name in _imported(source):
            found += [path for path in _modules(file.parent, name) if path not in found]
    return found


def _imported(source: Path) -> Iterator[str]:
    """Yield top-level names of what a file imports."""
    try:
        nodes = list(ast.walk(ast.parse(source.read_bytes())))
    except (OSError, ValueError, SyntaxError, RecursionError):
        return
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def _modules(folder: Path, name: str) -> list[Path]:
    """Return files in `folder` that `import name` runs or may run; the standard library comes before it."""
    if name in sys.stdlib_module_names:
        return []
    package = folder / name
    if package.is_dir():
        return sorted(path for path in package.rglob("*.py") if path.is_file())
    module = folder / f"{name}.py"
    return [module] if module.is_file() else []
