"""Weight roads: how weights get from the actor's rank 0 to the rollouts. One file per road.

A road moves bytes and nothing else: checksums and what is fatal are the same on all (`workers/weights.py`,
`rlctl/sync.py`). Which road a run takes is decided in `rlctl/roads.py`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from specs.schema import RoadKind
from workers.roads.base import ALIGNMENT, BlockReader, BlockWriter, BucketReader, BucketWriter, Reader, Writer

__all__ = [
    "ALIGNMENT", "IN_BLOCKS", "BlockReader", "BlockWriter", "BucketReader", "BucketWriter", "Reader", "Writer",
    "open_reader", "open_writer", "sweep",
]  # fmt: skip

IN_BLOCKS: frozenset[RoadKind] = frozenset({"shm"})  # whose ends pace each other; all others go in buckets

_ROADS: Mapping[RoadKind, str] = {
    "shm": "workers.roads.shm:Shm",
    "folder": "workers.roads.folder:Folder",
    "group": "workers.roads.group:Group",
    "cuda_ipc": "workers.roads.cuda_ipc:CudaIpc",
}


def open_writer(kind: RoadKind, options: Mapping[str, Any]) -> Writer:
    """The actor's end. `options` are the road's own (`rlctl/roads.py`)."""
    writer = _class(kind, "Writer")(options)
    assert isinstance(writer, Writer)
    return writer


def open_reader(kind: RoadKind, options: Mapping[str, Any], replica: int) -> Reader:
    """A rollout's end; `replica` is its rank."""
    reader = _class(kind, "Reader")(options, replica)
    assert isinstance(reader, Reader)
    return reader


def sweep(leftovers: Sequence[Mapping[str, str]]) -> None:
    """Remove the files that an offer names (`Writer.begin`), whoever died before it could: the driver does it after
    every sync, however that ended."""
    for each in leftovers:
        folder = Path(each["folder"])
        names = os.listdir(folder) if folder.is_dir() else []
        for name in names:
            if name.startswith(each["prefix"]):
                (folder / name).unlink(missing_ok=True)


def _class(kind: RoadKind, end: str) -> Any:
    module, _, name = _ROADS[kind].partition(":")
    return getattr(import_module(module), f"{name}{end}")
