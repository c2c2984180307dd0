"""Pools of environments whose files a test writes."""

from __future__ import annotations

import textwrap
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from specs.schema.environment import EnvironmentSection
from workers.environments.environment_pool import Described, Environment, EnvironmentPool

LIMIT_S = 90.0  # on a busy machine any call may take seconds


def written(folder: Path, code: str, name: str = "users.py") -> str:
    (folder / name).write_text(textwrap.dedent(code), "utf-8")
    return name


def make_pool(folder: Path, **section: Any) -> EnvironmentPool:
    named = EnvironmentSection(**{"processes": 2, "memory_MiB": 256, "call_timeout_s": LIMIT_S, **section})
    return EnvironmentPool(named, str(folder), log_path=folder / "output.log")


@asynccontextmanager
async def started(pool: EnvironmentPool) -> AsyncIterator[Described]:
    try:
        yield await pool.start()
    finally:
        await pool.close()


@asynccontextmanager
async def opened(
    pool: EnvironmentPool, row: Mapping[str, Any] | None = None, seed: int = 0
) -> AsyncIterator[Environment]:
    """An environment that was reset."""
    environment = await pool.open()
    try:
        await environment.reset(row or {}, seed)
        yield environment
    finally:
        await environment.close()
