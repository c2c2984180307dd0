"""Which packages are installed, by their metadata alone (nothing is imported for it), and where rlctl itself is.

rlctl runs from a clone of its repository, or from a wheel that pip installed. A wheel has what it needs of `scripts/`
and `docs/` in `specs/shipped/`, where `setup.py` puts it.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

OUR_PACKAGES = ("rlctl", "specs", "workers", "backends")
_ROOT = Path(__file__).absolute().parents[1]  # links are kept: another interpreter has ours alone (`path_for`)
_SHIPPED = _ROOT / "specs" / "shipped"
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


# ── a clone, or a wheel ───────────────────────────────────────────────────────────────────────────────


def package_root() -> Path:
    """Return the folder that holds rlctl, specs, workers and backends."""
    return _ROOT


def package_path(theirs: str) -> str:
    """Return a PYTHONPATH that begins with our packages, and has them once."""
    ours = str(_ROOT)
    return os.pathsep.join([ours, *(part for part in theirs.split(os.pathsep) if part and part != ours)])


def path_for(python: str, theirs: str, folder: Path) -> str:
    """Return the PYTHONPATH with which an interpreter imports our packages. Where they lie in a site-packages folder,
    another one than this gets a folder of links to them alone, made in `folder`: it must not see this one's torch."""
    path = package_path(theirs)
    if python == sys.executable or _ROOT.name not in ("site-packages", "dist-packages"):
        return path
    links = folder / "packages"
    links.mkdir(parents=True, exist_ok=True)
    for name in OUR_PACKAGES:
        if not (links / name).is_symlink():
            (links / name).symlink_to(_ROOT / name)
    return path.replace(str(_ROOT), str(links), 1)


def with_our_packages() -> dict[str, str]:
    """Return this environment for another process of this interpreter that imports our packages, whatever the current
    folder holds."""
    return {**os.environ, "PYTHONPATH": package_path(os.environ.get("PYTHONPATH", ""))}


def in_clone() -> bool:
    return not _SHIPPED.is_dir()


def setup_script() -> Path:
    """Return the script that `rlctl setup-engine` runs."""
    return (_ROOT if in_clone() else _SHIPPED) / "scripts" / "setup-engine"


def environments() -> Path:
    """Return the folder where that script makes `.venv-ENGINE`."""
    return _ROOT if in_clone() else Path.cwd().resolve()


def page(name: str) -> str:
    """Return the path of a page of the documentation, such as `spec.md`: in the clone, or where the wheel has it."""
    return f"docs/{name}" if in_clone() else str(_SHIPPED / "docs" / name)
