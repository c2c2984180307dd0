"""Packages and interpreters that a test file may have to do without."""

from __future__ import annotations

import os
import sys
from importlib.util import LazyLoader, find_spec, module_from_spec
from pathlib import Path
from types import ModuleType

import pytest


def interpreter(engine: str) -> Path:
    """Return the one that `scripts/setup-engine` makes, or that of RLCTL_<ENGINE>_PYTHON."""
    made = Path(__file__).parents[2] / f".venv-{engine}" / "bin" / "python"
    return Path(os.environ.get(f"RLCTL_{engine.upper()}_PYTHON", made))


VLLM_PYTHON, MEGATRON_PYTHON = interpreter("vllm"), interpreter("megatron")
needs_vllm, needs_megatron = (
    pytest.mark.skipif(not python.exists(), reason=f"no {python}: scripts/setup-engine makes it")
    for python in (VLLM_PYTHON, MEGATRON_PYTHON)
)


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
