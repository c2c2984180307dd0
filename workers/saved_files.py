"""Files of a checkpoint that a rank wrote: each rank syncs its own to disk, and reports size and checksum.

The driver may sit on another host. Its own `fsync` does not flush this host's memory, and a
checksum computed there would cover what arrived, not what was written.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

import xxhash

from specs.safetensors_header import fsync

FileMark = dict[str, int | str]  # {"bytes": size, "xxh3": xxh3-64 of the content, hex}


def mark(path: Path) -> FileMark:
    """Return size and checksum of a file."""
    with open(path, "rb") as file:
        return {"xxh3": hashlib.file_digest(file, xxhash.xxh3_64).hexdigest(), "bytes": file.tell()}


def settle(folder: Path, written: Iterable[Path]) -> dict[str, FileMark]:
    """Sync this rank's files in `folder`, and their names, to disk; returns their marks by relative name."""
    marks = {}
    for path in written:
        fsync(path)
        marks[str(path.relative_to(folder))] = mark(path)
    fsync(folder)
    return marks
