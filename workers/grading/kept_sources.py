"""Keep reward code as it was when the run started, for every grading process.

A process that hung or crashed is replaced, hours later perhaps, when the file may have been edited for the next run.
So the driver reads the files once, and each process, on whichever host, imports from what it was given.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any

from workers.grading.reward_sources import reward_sources

_kept: dict[str, bytes] = {}  # of this process


def read_sources(terms: Sequence[Mapping[str, Any]], base: str) -> dict[str, str]:
    """Return by path the source of all that the terms' files import from their folders; bytes as characters, for
    JSON."""
    files = [Path(base, Path(term["path"].rpartition(":")[0]).expanduser()) for term in terms if "path" in term]
    paths = {path for file in files for path in reward_sources(file.resolve()) if path.is_file()}
    return {str(path): path.read_bytes().decode("latin-1") for path in sorted(paths)}


def keep_sources(sources: Mapping[str, str]) -> None:
    """Have this process import these files from memory."""
    _kept.update({path: text.encode("latin-1") for path, text in sources.items()})
    sys.meta_path.insert(sys.meta_path.index(PathFinder), _Finder)


def from_memory(found: ModuleSpec) -> ModuleSpec:
    """Return the same module, from what was kept of its file."""
    if found.origin in _kept:
        found.loader = _Loader(found.name, found.origin)
    return found


class _Finder:
    """Finds what the search path has, in its order."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        found = PathFinder.find_spec(name, path, target)
        return None if found is None else from_memory(found)


class _Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(_kept[self.path], self.path)
