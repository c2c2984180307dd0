"""Weight transports: how weights get from the actor's rank 0 to the rollouts. One file per transport.

A transport only moves bytes: checksums and fatal errors are the same for all (`workers/transports/ends.py`,
`rlctl/loop/sync.py`). Which transport a run takes is decided in `rlctl/loop/weight_transport.py`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from specs.schema.spec import TransportKind
from workers.transports.base import Reader, Writer

# By what both ends of a transport compare a weight: xxh3-64 of bytes in host memory, or a sum over words that a device
# computes where they lie (`backends/weights/checksum.py`, `word_sum.py`).
Checksum = Literal["xxh3", "word_sum"]

IN_BLOCKS: frozenset[TransportKind] = frozenset({"shm"})  # their ends pace each other; all others send buckets

_TRANSPORTS: Mapping[TransportKind, str] = {
    "shm": "workers.transports.shm:Shm",
    "folder": "workers.transports.folder:Folder",
    "group": "workers.transports.process_group:Group",
    "cuda_ipc": "workers.transports.cuda_ipc:CudaIpc",
}
_IN_DELTAS: Mapping[TransportKind, str] = {"folder": "workers.transports.delta_folder:DeltaFolder"}


def checksum_of(kind: TransportKind, options: Mapping[str, Any]) -> Checksum:
    """`word_sum` where the windows of a transport lie in device memory."""
    return "word_sum" if kind == "cuda_ipc" or options.get("device") == "cuda" else "xxh3"


def open_writer(kind: TransportKind, options: Mapping[str, Any]) -> Writer:
    """The actor's end. `options` are the transport's own (`rlctl/loop/weight_transport.py`)."""
    writer = _class(kind, options, "Writer")(options)
    assert isinstance(writer, Writer)
    return writer


def open_reader(kind: TransportKind, options: Mapping[str, Any], replica: int) -> Reader:
    """A rollout's end; `replica` is its rank."""
    reader = _class(kind, options, "Reader")(options, replica)
    assert isinstance(reader, Reader)
    return reader


def sweep(leftovers: Sequence[Mapping[str, str]]) -> None:
    """Remove the files that an offer names (`Writer.begin`), if a killed process left them: the driver does it after
    every sync, however that ended."""
    for each in leftovers:
        folder = Path(each["folder"])
        names = os.listdir(folder) if folder.is_dir() else []
        for name in names:
            if name.startswith(each["prefix"]):
                (folder / name).unlink(missing_ok=True)


def _class(kind: TransportKind, options: Mapping[str, Any], end: str) -> Any:
    module, _, name = (_IN_DELTAS if options.get("delta") else _TRANSPORTS)[kind].partition(":")
    return getattr(import_module(module), f"{name}{end}")
