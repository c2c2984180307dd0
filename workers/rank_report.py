"""Report of a rank for `as_built.json`. Versions are read from package metadata: no package is imported."""

from __future__ import annotations

import os
import socket
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from backends.protocol import Rank
from specs.schema.engines.engine_registry import library_names
from specs.wire.as_built import AsBuilt, ModelBuilt

REPORTED = (*library_names(), "numpy", "safetensors", "pyzmq")


def _versions() -> dict[str, str]:
    found = {"python": ".".join(str(part) for part in sys.version_info[:3])}
    for package in REPORTED:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _gpu() -> str:
    """Return the UUID of the GPU that this process has begun to use, if there is one."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return ""
    from backends.weights.device_memory import this_gpu  # here: it imports torch

    return this_gpu()


def as_built(role: str, rank: Rank, *, engine: str, device: str, model: ModelBuilt | None) -> AsBuilt:
    """Return this rank's report; `model` is what the engine read back from its layers."""
    return AsBuilt(
        role=role,
        rank=rank.rank,
        world_size=rank.world_size,
        host=socket.gethostname(),
        pid=os.getpid(),
        python=sys.executable,
        device=device,
        gpu=_gpu(),
        threads=int(os.environ.get("OMP_NUM_THREADS", "0") or 0),
        engine=engine,
        versions=_versions(),
        model=model,
    )
