"""Make the line that `rlctl --version` prints, from files alone: `importlib.metadata` and git would take too long."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from rlctl import __version__

ROOT = Path(__file__).resolve().parents[1]
_EXTRA = re.compile(r"""^Requires-Dist: ([\w.-]+).*extra == ["']([\w-]+)["']""", re.MULTILINE)
_FOR_DEVELOPERS = {"dev", "docs"}


def version_line() -> str:
    """Return version, commit where rlctl runs from a clone, and the extras that are installed."""
    found = [f"commit {commit[:10]}"] if (commit := commit_of(ROOT)) else []
    return f"rlctl {__version__} ({', '.join([*found, 'extras: ' + (', '.join(extras(sys.path)) or 'none')])})"


def commit_of(root: Path) -> str:
    """Return the commit that is checked out in a clone or in a work tree of one; "" where there is none."""
    git = root / ".git"
    try:
        if git.is_file():  # of a work tree
            git = root / git.read_text(encoding="utf-8").removeprefix("gitdir: ").strip()
        head = (git / "HEAD").read_text(encoding="utf-8").strip()
        if not (name := head.removeprefix("ref: ")) or name == head:
            return head
        shared = git / "commondir"
        folder = git / shared.read_text(encoding="utf-8").strip() if shared.is_file() else git
        if (folder / name).is_file():
            return (folder / name).read_text(encoding="utf-8").strip()
        packed = (line.split() for line in (folder / "packed-refs").read_text(encoding="utf-8").splitlines())
        return next((words[0] for words in packed if words[1:] == [name]), "")
    except (OSError, UnicodeDecodeError):
        return ""


def extras(folders: list[str]) -> Iterator[str]:
    """Yield the extras of rlctl all of whose packages are installed in these folders."""
    infos = {
        re.split(r"-\d", info.name)[0].lower().replace("_", "-"): info
        for folder in reversed(folders)
        if Path(folder).is_dir()
        for info in Path(folder).iterdir()
        if info.suffix in (".dist-info", ".egg-info")
    }
    own = infos.get("rlctl", infos.get("rlctl.egg-info", Path()))
    wanted: dict[str, list[str]] = {}
    for file in (own / "METADATA", own / "PKG-INFO"):
        for package, extra in _EXTRA.findall(file.read_text(encoding="utf-8")) if file.is_file() else ():
            wanted.setdefault(extra, []).append(package.lower().replace("_", "-"))
    yield from (
        extra for extra, packages in wanted.items() if extra not in _FOR_DEVELOPERS and infos.keys() >= set(packages)
    )
