"""Shared memory between processes of one host that needs no mount: a mapped file without a name.

The creator hands its descriptor to the others over a Unix socket. The file lives exactly as long as a process maps it
or holds its descriptor, so that no crash leaves anything behind; and it does not lie in `/dev/shm`, which in containers
is small.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from specs.errors import SyncError

SHARED_MEMORY = Path("/dev/shm")


def folders() -> list[Path]:
    """Where a process may put what others of this host open, the best first."""
    return [place for place in (SHARED_MEMORY, Path(tempfile.gettempdir())) if os.access(place, os.W_OK | os.X_OK)]


class SharedSegment:
    """`bytes_U` is the mapped memory as uint8. The creator's `descriptor` is that of its file."""

    def __init__(self, descriptor: int, nbytes: int) -> None:
        self.descriptor, self.nbytes = descriptor, nbytes
        try:
            self._map = mmap.mmap(descriptor, nbytes)
        except (OSError, ValueError):
            os.close(descriptor)
            raise
        self.bytes_U: NDArray[np.uint8] = np.frombuffer(self._map, dtype=np.uint8)

    @classmethod
    def create(cls, nbytes: int) -> SharedSegment:
        """A new segment. Raises SyncError when the memory is not there: pages are reserved at once, since a write to
        one that cannot be had later ends the process (SIGBUS)."""
        descriptor, where, hint = _nameless()
        try:
            os.posix_fallocate(descriptor, 0, nbytes)
        except OSError as error:
            os.close(descriptor)
            told = f"{nbytes / 2**20:g} MiB of shared memory are unavailable{where}: {error.strerror}"
            raise SyncError(told, hint=f'{hint}, or set sync.transport = "folder"') from None
        return cls(descriptor, nbytes)

    @classmethod
    def received(cls, descriptors: Sequence[int]) -> SharedSegment:
        """Map the open file that came with a message and close it here; the mapping keeps it. Raises SyncError."""
        if not descriptors:
            hint = "raise the number of files that a process may have open (ulimit -n)"
            raise SyncError("shared memory did not come with the message that announces it", hint=hint)
        segment = cls(descriptors[0], os.fstat(descriptors[0]).st_size)
        segment._close_file()
        return segment

    def _close_file(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def close(self) -> None:
        self._close_file()
        self.bytes_U = np.zeros(0, dtype=np.uint8)
        with contextlib.suppress(BufferError):  # a view is still alive; the mapping goes with it
            self._map.close()


def _nameless() -> tuple[int, str, str]:
    """Descriptor of an empty file, where it lies, and what a person does when it cannot grow."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("rlctl-ring"), "", "free some memory"
    for folder in folders():  # a Python that was built for an older Linux
        with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=folder) as file:
            hint = f"`df {folder}` says how full it is (in a container, --shm-size makes it larger)"
            return os.dup(file.fileno()), f" in {folder}", hint
    hint = "have /dev/shm or the folder of temporary files writable"
    raise SyncError("there is no place for shared memory", hint=f'{hint}, or set sync.transport = "folder"')
