"""Which packages this process could import, by their metadata alone: nothing is imported for it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version


@cache
def installed_here(packages: tuple[str, ...]) -> Mapping[str, str]:
    """Installed version of each of those packages that is there."""
    found = {}
    for name in packages:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
