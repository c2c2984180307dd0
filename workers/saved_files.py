"""Files that a rank leaves in a checkpoint: brought to the disk by the rank itself, and described by what it wrote.

The driver may sit on another host. Its own `fsync` says nothing about what this host still holds in memory, and its
checksum would be that of what arrived, not of what was meant.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import xxhash

from specs.tensor_files import fsync

FileMark = dict[str, int | str]  # {"bytes": size, "xxh3": xxh3-64 of the content, hex}


def mark(path: Path) -> FileMark:
    """Size and checksum of a file as it is now."""
    digest, size = xxhash.xxh3_64(), 0
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
            size += len(block)
    return {"bytes": size, "xxh3": digest.hexdigest()}


def settle(folder: Path, written: Iterable[Path]) -> dict[str, FileMark]:
    """Have the files of `folder` that this rank wrote, and their names, on the disk; their marks by relative name."""
    marks = {}
    for path in written:
        fsync(path)
        marks[str(path.relative_to(folder))] = mark(path)
    fsync(folder)
    return marks
