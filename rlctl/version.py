"""Make the line that `rlctl --version` prints: version, commit and extras."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib.metadata import distributions, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from rlctl import __version__

_FOR_DEVELOPERS = {"dev", "docs"}


def version_line() -> str:
    """Return version, commit where rlctl runs from a clone, and the extras that are installed."""
    commit = commit_of(Path(__file__).parents[1])
    found = ", ".join(extras(requires("rlctl") or (), {each.name for each in distributions()}))
    return f"rlctl {__version__} ({f'commit {commit}, ' if commit else ''}extras: {found or 'none'})"


def commit_of(root: Path) -> str:
    """Return the commit that is checked out in a clone; "" where there is none."""
    if (root / ".git").exists():
        with suppress(OSError, subprocess.CalledProcessError):  # no git, or none that reads another user's clone
            command = ["git", "-C", str(root), "rev-parse", "--short=10", "HEAD"]
            return subprocess.check_output(command, text=True, stderr=subprocess.DEVNULL).strip()
    return ""


def extras(required: Iterable[str], installed: Iterable[str]) -> Iterator[str]:
    """Yield the extras all of whose packages are installed. `required`: as `Requires-Dist` has them."""
    there = {canonicalize_name(name) for name in installed}
    wanted: dict[str, list[str]] = {}
    for requirement in map(Requirement, required):
        if requirement.marker is not None:
            extra = str(requirement.marker).partition("extra == ")[2].strip("\"'")
            wanted.setdefault(extra, []).append(canonicalize_name(requirement.name))
    yield from (extra for extra, names in wanted.items() if extra not in _FOR_DEVELOPERS and there >= {*names})
