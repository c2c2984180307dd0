"""Packages that a test file may have to do without."""

from __future__ import annotations

import sys
from importlib.util import LazyLoader, find_spec, module_from_spec
from types import ModuleType

import pytest


def skip_without(name: str, reason: str) -> None:
    """Skip the calling file where the package is not installed. It is not imported: every process collects every
    file, and few run this one."""
    if find_spec(name) is None:
        pytest.skip(reason, allow_module_level=True)


def when_used(name: str, reason: str) -> ModuleType:
    """Return a package that is imported at its first use, or skip the calling file."""
    skip_without(name, reason)
    if name in sys.modules:
        return sys.modules[name]
    spec = find_spec(name)
    assert spec is not None
    assert spec.loader is not None
    spec.loader = LazyLoader(spec.loader)
    module = sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
