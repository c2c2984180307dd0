"""Folder for a sync: one safetensors file, in memory unless a folder is named, deleted when it is loaded.

SGLang's other transport for a client, /update_weights_from_tensor, unpickles what it is sent; this one reads
safetensors. The file has no name of its own, only a link to this process's descriptor: it is gone with the process,
however that ends.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from io import FileIO
from pathlib import Path

import numpy as np
import psutil
from numpy.typing import NDArray

from backends.protocol import WeightSpec
from backends.weights.checksum import checksum_bytes
from specs.errors import SyncError
from specs.safetensors_header import CODES, make_header, read_header

_NAME = "model.safetensors"


class WeightsFolder:
    """Filled weight by weight, in any order. `path` is sent to the server."""

    def __init__(self, weights: Mapping[str, WeightSpec], parent: str) -> None:
        """Raises SyncError if there is no room for a whole copy of the weights."""
        header, _ = make_header([(spec.name, CODES[spec.dtype], spec.shape) for spec in weights.values()], {})
        nbytes = len(header) + sum(spec.nbytes for spec in weights.values())
        try:
            self._file = _file(parent, nbytes)
        except OSError as error:
            raise SyncError(
                f"no room for the weights in {parent or 'memory'}: {error}",
                hint="name a folder with room for the whole model in rollout.engine.weights_dir",
            ) from None
        self.path = Path(tempfile.mkdtemp(prefix="rlctl-weights-"))  # mode 0700
        (self.path / _NAME).symlink_to(f"/proc/{os.getpid()}/fd/{self._file.fileno()}")
        os.pwrite(self._file.fileno(), header, 0)
        self._entries = read_header(self.path / _NAME).entries
        self.checksums: dict[str, str] = {}

    def write(self, spec: WeightSpec, buffer: NDArray[np.uint8]) -> str:
        """Returns the checksum of the bytes read back from the file."""
        entry = self._entries[spec.name]
        assert entry.nbytes == len(buffer), spec.name
        for offset in range(0, entry.nbytes, _PIECE):
            _write_all(self._file.fileno(), buffer[offset : offset + _PIECE], entry.start + offset)
        back = np.memmap(self._file, dtype=np.uint8, mode="r", offset=entry.start, shape=(entry.nbytes,))
        self.checksums[spec.name] = checksum_bytes(back)
        return self.checksums[spec.name]

    def delete(self) -> None:
        self._file.close()
        shutil.rmtree(self.path, ignore_errors=True)


def _file(parent: str, nbytes: int) -> FileIO:
    """A file without a name and with all its room: in a folder, or in memory that takes no mount as `/dev/shm` would.
    Raises OSError."""
    if parent:
        free, file = shutil.disk_usage(parent).free, tempfile.TemporaryFile(dir=parent, buffering=0)  # noqa: SIM115
    else:
        free, file = psutil.virtual_memory().available, FileIO(os.memfd_create("rlctl-weights"), "r+b")
    try:
        if free < nbytes:
            raise OSError(f"{nbytes} bytes needed, {free} free")
        os.posix_fallocate(file.fileno(), 0, nbytes)
    except OSError:
        file.close()
        raise
    return file


_PIECE = 2**30  # Linux writes at most 2 GiB at a time


def _write_all(descriptor: int, data: NDArray[np.uint8], offset: int) -> None:
    wrote = os.pwrite(descriptor, np.ascontiguousarray(data).data, offset)
    if wrote != len(data):
        raise SyncError(f"only {wrote} of {len(data)} bytes of a weight could be written: is the disk full?")
