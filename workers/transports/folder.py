"""The transport through a folder that both ends reach: each bucket is a safetensors file. For any number of hosts.

A file gets its name when it is complete, and no name is used twice, so a cache of a shared file system cannot return
an older file. At most two buckets lie in the folder at a time, none after a sync. Nothing is synced to
disk: a power cut that loses a file also ends the sync that it belongs to.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backends.protocol import Buffer
from specs.errors import RlctlError, SyncError
from specs.safetensors_header import CODES, Header, make_header, read_header
from workers.transports.base import (
    ALIGNMENT,
    FOLDER_PREFIX,
    BucketReader,
    BucketWriter,
    Entry,
    Readers,
    filled_bytes,
)

_APPEAR_TIMEOUT_S = 60.0  # a shared file system may show a new file late


class FolderWriter(BucketWriter):
    """Fills one buffer in host memory, then writes it: the file is a copy, so a single window will do."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.folder = Path(options["folder"])
        self.prefix = f"{FOLDER_PREFIX}{secrets.token_hex(8)}-"
        self.passes = self.windows = 0
        self.files: dict[int, list[Path]] = {}  # by bucket
        self.buffer_U = np.zeros(0, dtype=np.uint8)

    def begin(self, sizes: Sequence[int], windows: int, readers: Readers) -> dict[str, Any]:
        self.rest()
        self.passes, self.windows, window_bytes = self.passes + 1, windows, max(sizes, default=0)
        if len(self.buffer_U) < window_bytes:
            self.buffer_U = aligned_bytes(window_bytes)
        leftovers = [{"folder": str(self.folder), "prefix": self.prefix}]
        return {"folder": str(self.folder), "stem": f"{self.prefix}{self.passes}", "leftovers": leftovers}

    def window(self, bucket: int) -> Buffer:
        for read in self.files.pop(bucket - self.windows, []):
            read.unlink(missing_ok=True)
        return self.buffer_U

    def send(self, bucket: int, entries: Sequence[Entry]) -> int:
        path = self.folder / f"{self.prefix}{self.passes}-{bucket}.safetensors"
        kinds = [(entry["name"], CODES[entry["dtype"]], tuple(entry["shape"])) for entry in entries]
        self.files[bucket] = [path]
        return write_bucket(path, kinds, [bytes_of(self.buffer_U, entry) for entry in entries])

    def rest(self) -> None:
        for path in chain.from_iterable(self.files.values()):
            path.unlink(missing_ok=True)
        self.files = {}

    def close(self) -> None:
        self.rest()
        self.buffer_U = np.zeros(0, dtype=np.uint8)


class FolderReader(BucketReader):
    """Reads each file whole into one buffer of its own."""

    def __init__(self, options: Mapping[str, Any], replica: int) -> None:
        self.folder, self.stem = Path(), ""
        self.buffer_U = np.zeros(0, dtype=np.uint8)

    def begin(self, offer: Mapping[str, Any]) -> None:
        self.folder, self.stem = Path(offer["folder"]), str(offer["stem"])
        if not self.folder.is_dir():
            hint = "name one that all hosts of the run share as sync.folder"
            raise SyncError(f"the rollout's host has no folder {self.folder}", hint=hint)

    def receive(self, bucket: int, entries: Sequence[Entry]) -> Buffer:
        path = self.folder / f"{self.stem}-{bucket}.safetensors"
        header = wait_for_header(path)
        if (filled := filled_bytes(entries)) > len(self.buffer_U):
            self.buffer_U = aligned_bytes(filled)
        with path.open("rb", buffering=0) as file:
            for entry in entries:
                name, nbytes, offset = entry["name"], int(entry["nbytes"]), int(entry["offset"])
                there = header.entries.get(name)
                if there is None or (there.dtype, list(there.shape)) != (CODES[entry["dtype"]], entry["shape"]):
                    raise SyncError(f"weight {name} is not in {path} as it was announced")
                file.seek(there.start)
                read_into(file, self.buffer_U[offset : offset + nbytes].data, name)
        return self.buffer_U

    def close(self) -> None:
        self.buffer_U = np.zeros(0, dtype=np.uint8)


def bytes_of(window_U: NDArray[np.uint8], entry: Entry) -> NDArray[np.uint8]:
    """A weight's bytes in a window."""
    return window_U[int(entry["offset"]) : int(entry["offset"]) + int(entry["nbytes"])]


def write_bucket(
    path: Path,
    kinds: Sequence[tuple[str, str, tuple[int, ...]]],
    data: Sequence[NDArray[np.uint8]],
    metadata: Mapping[str, str] | None = None,
) -> int:
    """A safetensors file that has its name when it is complete; returns its bytes. Raises RlctlError."""
    header, order = make_header(kinds, metadata or {})
    being_written = path.with_suffix(".tmp")
    try:
        with being_written.open("wb") as file:
            file.write(header)
            for i in order:
                file.write(data[i].data)
        being_written.rename(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            being_written.unlink(missing_ok=True)
        hint = "the actor's host must have this folder and two buckets of room in it (sync.folder, sync.bucket_MiB)"
        raise RlctlError(f"cannot write weights to {path}: {error}", hint=hint) from error
    return len(header) + sum(len(each) for each in data)


def wait_for_header(path: Path) -> Header:
    """Header of a bucket's file, which a shared file system may show late. Raises SyncError."""
    deadline = time.monotonic() + _APPEAR_TIMEOUT_S
    while True:
        try:
            return read_header(path)
        except FileNotFoundError:
            if time.monotonic() > deadline:
                raise SyncError(f"the rollout's host does not see {path}, which the actor wrote") from None
            time.sleep(0.01)
        except ValueError as error:
            raise SyncError(f"a bucket of weights is truncated: {path} {error}") from None


def read_into(file: Any, target: memoryview, name: str) -> None:
    """Read exactly as many bytes as `target` has, of weight `name`. Raises SyncError."""
    done = 0
    while done < len(target):
        got = file.readinto(target[done:])
        if not got:
            raise SyncError(f"weight {name} is truncated: {done} of {len(target)} bytes")
        done += got


def aligned_bytes(nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Memory whose first byte is aligned as the weights in a window are."""
    raw_U = np.empty(nbytes + ALIGNMENT, dtype=np.uint8)
    start = -raw_U.ctypes.data % ALIGNMENT
    return raw_U[start : start + nbytes]
