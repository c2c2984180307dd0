"""Which packages are installed, by their metadata alone (nothing is imported for it), and where rlctl itself is.

rlctl runs from a clone of its repository, or from a wheel that pip installed. A wheel has what it needs of `scripts/`
and `docs/` in `specs/shipped/`, where `setup.py` puts it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
_SHIPPED = _ROOT / "specs" / "shipped"
_EXTRA = re.compile(r"""^Requires-Dist: ([\w.-]+).*extra == ["']([\w-]+)["']""", re.MULTILINE)
_VERSION = re.compile(r"^Version:[ \t]*(\S+)", re.MULTILINE)


def installed_here(packages: Iterable[str]) -> Mapping[str, str]:
    """Return the installed version of each of those packages that is there."""
    return {name: found for name in packages if (found := version_here(name))}


@cache
def version_here(package: str) -> str:
    """Return a package's installed version; "" where it is not installed. Parsing all of its metadata would take 20
    times as long."""
    try:
        found = distribution(package)
    except PackageNotFoundError:
        return ""
    line = _VERSION.search(found.read_text("METADATA") or found.read_text("PKG-INFO") or "")
    return line[1] if line else found.version


def installed_extras() -> list[str]:
    """Return the extras of rlctl whose packages are all installed; none where rlctl itself was not installed."""
    try:
        found = distribution("rlctl")
    except PackageNotFoundError:
        return []
    wanted: dict[str, list[str]] = {}
    for package, extra in _EXTRA.findall(found.read_text("METADATA") or found.read_text("PKG-INFO") or ""):
        wanted.setdefault(extra, []).append(package)
    return [
        extra for extra, packages in wanted.items() if extra not in ("dev", "docs") and all(map(version_here, packages))
    ]


# ── a clone, or a wheel ───────────────────────────────────────────────────────────────────────────────


def in_clone() -> bool:
    return not _SHIPPED.is_dir()


def clone() -> Path | None:
    """Return the folder of the clone that rlctl runs from."""
    return _ROOT if in_clone() else None


def setup_script() -> Path:
    """Return the script that `rlctl setup-engine` runs."""
    return (_ROOT if in_clone() else _SHIPPED) / "scripts" / "setup-engine"


def environments() -> Path:
    """Return the folder where that script makes `.venv-ENGINE`."""
    return _ROOT if in_clone() else Path.cwd().resolve()


def page(name: str) -> str:
    """Return the path of a page of the documentation, such as `memory.md`: in the clone, or where the wheel has it."""
    return f"docs/{name}" if in_clone() else str(_SHIPPED / "docs" / name)
