"""Packages and interpreters that a test file may have to do without."""

from __future__ import annotations

import os
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

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

needs_deepspeed = pytest.mark.skipif(
    find_spec("deepspeed") is None, reason="scripts/setup-engine deepspeed installs it"
)


def skip_without(name: str, reason: str) -> None:
    """Skip the calling file where the package is not installed. It is not imported: every process collects every
    file, and few run this one."""
    if find_spec(name) is None:
        pytest.skip(reason, allow_module_level=True)


class WhenUsed:
    """Stand for a package that is imported when a test first uses it; pytest asks every name for private ones."""

    def __init__(self, name: str, reason: str) -> None:
        skip_without(name, reason)
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(import_module(self._name), name)
