"""Find the files that a reward module consists of, and keep them as they were when the run started.

A process that hung or crashed is replaced, hours later perhaps, when the file may have been edited for the next run.
So the driver reads the files once, and each grading process, on whichever host, imports from what it was given.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any

_kept: dict[str, bytes] = {}  # of this process, by path


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
    package, module = folder / name, folder / f"{name}.py"
    if name in sys.stdlib_module_names:
        return []
    found = sorted(package.rglob("*.py")) if package.is_dir() else [module]
    return [path for path in found if path.is_file()]


def read_sources(functions: Iterable[str], base: str) -> dict[str, str]:
    """Return by path the source of all that the files of functions, `file.py:name`, import from their folders; bytes
    as characters, for JSON."""
    files = [Path(base, Path(function.rpartition(":")[0]).expanduser()) for function in functions]
    paths = {path for file in files for path in reward_sources(file.resolve()) if path.is_file()}
    return {str(path): path.read_bytes().decode("latin-1") for path in sorted(paths)}


def keep_sources(sources: Mapping[str, str]) -> None:
    """Have this process import these files from memory."""
    _kept.update({path: text.encode("latin-1") for path, text in sources.items()})
    sys.meta_path.insert(sys.meta_path.index(PathFinder), _KeptFinder)


def from_memory(found: ModuleSpec) -> ModuleSpec:
    """Return the same module, from what was kept of its file."""
    if found.origin in _kept:
        found.loader = _KeptLoader(found.name, found.origin)
    return found


class _KeptFinder:
    """Finds what the search path has, in its order."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        found = PathFinder.find_spec(name, path, target)
        return None if found is None else from_memory(found)


class _KeptLoader(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(_kept[self.path], self.path)
