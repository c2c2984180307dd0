"""Shared-memory segments between processes of one host: a mapped file that nobody else can open for long.

The creator makes the file (mode 0600), the others open it by path, then the creator unlinks it. Or the file has no
name, and its descriptor is handed to another process. From there on it lives exactly as long as a process maps it, so
that no crash leaves anything behind in /dev/shm.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


def _folder() -> Path:
    shm = Path("/dev/shm")
    return shm if shm.is_dir() and os.access(shm, os.W_OK) else Path(tempfile.gettempdir())


class Segment:
    """`bytes_U` is the mapped memory as uint8."""

    def __init__(self, path: Path, descriptor: int, nbytes: int) -> None:
        self.path, self.nbytes = path, nbytes
        try:
            self._map = mmap.mmap(descriptor, nbytes)
        finally:
            os.close(descriptor)
        self.bytes_U: NDArray[np.uint8] = np.frombuffer(self._map, dtype=np.uint8)
        self._linked = True

    @classmethod
    def create(cls, nbytes: int) -> Segment:
        """A new segment. Raises OSError when the memory is not there (pages are reserved at once)."""
        path = _folder() / f"rlctl-{os.getpid()}-{secrets.token_hex(8)}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, nbytes)
        except OSError:
            os.close(descriptor)
            path.unlink()
            raise
        return cls(path, descriptor, nbytes)

    @classmethod
    def open(cls, path: str, nbytes: int) -> Segment:
        descriptor = os.open(path, os.O_RDWR)
        segment = cls(Path(path), descriptor, nbytes)
        segment._linked = False
        return segment

    @classmethod
    def of(cls, descriptor: int, nbytes: int) -> Segment:
        """Of an open file, which is closed here; the mapping keeps it."""
        segment = cls(Path(), descriptor, nbytes)
        segment._linked = False
        return segment

    def unlink(self) -> None:
        """Take the name away; mappings stay. A second call does nothing."""
        if self._linked:
            self.path.unlink(missing_ok=True)
            self._linked = False

    def close(self) -> None:
        self.unlink()
        self.bytes_U = np.zeros(0, dtype=np.uint8)
        with contextlib.suppress(BufferError):  # a view is still alive; the mapping goes with it
            self._map.close()
