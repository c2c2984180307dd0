"""The transport through a folder that sends changes alone (`sync.delta`): for sites without a fast network.

Both ends keep the bytes that they sent or received last. Each pass has a name, that of its files. A reader says which
one it holds: where that is the last one, it gets a delta on it, else a full copy. What is proven is the same: each
weight is handed to the engine whole, and the checksum of all of it compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backends.protocol import Buffer
from specs.errors import SyncError
from specs.safetensors_header import CODES, ITEM_BYTES, Header
from workers.transports.base import Entry, Readers, filled_bytes
from workers.transports.delta_coding import Delta, apply, delta_of
from workers.transports.folder import (
    FolderReader,
    FolderWriter,
    aligned_bytes,
    bytes_of,
    read_into,
    wait_for_header,
    write_bucket,
)

# A weight in a delta's file: the two streams of what changed, or all of it; nothing where nothing changed.
_GAPS, _VALUES, _WHOLE = "gaps/", "values/", "whole/"


class DeltaFolderWriter(FolderWriter):
    """Writes a delta, a full copy or both of each bucket, as the readers need."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        self.last: dict[int, NDArray[np.uint8]] = {}  # each bucket as it was sent last
        self.version = ""  # the pass that `last` is; empty while one is sent
        self._before = self._after = ""
        self._writes_whole = self._writes_delta = False
        self._unsent = 0  # buckets of this pass

    def begin(self, sizes: Sequence[int], windows: int, readers: Readers) -> dict[str, Any]:
        offer = super().begin(sizes, windows, readers)
        self._before, self._after, self.version = self.version, offer["stem"], ""
        self._writes_delta = self._before != "" and self._before in readers.held
        self._writes_whole = not self._writes_delta or set(readers.held) != {self._before}
        if not self._writes_delta:
            self.last = {}
        self._unsent = len(sizes)
        return {**offer, "whole": self._writes_whole, "before": self._before if self._writes_delta else ""}

    def send(self, bucket: int, entries: Sequence[Entry]) -> int:
        sent = super().send(bucket, entries) if self._writes_whole else 0
        if self._writes_delta:
            path = _delta_path(self.folder, self._after, bucket)
            sent += self._write_delta(path, self.last[bucket], entries)
            self.files.setdefault(bucket, []).append(path)
        self._keep_last(bucket, self.buffer_U[: filled_bytes(entries)])
        self._unsent -= 1
        return sent

    def _keep_last(self, bucket: int, sent_U: NDArray[np.uint8]) -> None:
        if bucket not in self.last:
            self.last[bucket] = np.empty_like(sent_U)
        self.last[bucket][:] = sent_U

    def _write_delta(self, path: Path, last_U: NDArray[np.uint8], entries: Sequence[Entry]) -> int:
        kinds: list[tuple[str, str, tuple[int, ...]]] = []
        data: list[NDArray[np.uint8]] = []
        for entry in entries:
            code, after_U = CODES[entry["dtype"]], bytes_of(self.buffer_U, entry)
            delta = delta_of(bytes_of(last_U, entry), after_U, ITEM_BYTES[code])
            if delta is None:
                kinds.append((_WHOLE + entry["name"], code, tuple(entry["shape"])))
                data.append(after_U)
            elif delta.nbytes:
                for prefix, stream in ((_GAPS, delta.gaps), (_VALUES, delta.values)):
                    kinds.append((prefix + entry["name"], "U8", (len(stream),)))
                    data.append(np.frombuffer(stream, dtype=np.uint8))
        return write_bucket(path, kinds, data, {"before": self._before})

    def rest(self) -> None:
        super().rest()
        if not self._unsent:
            self.version = self._after

    def close(self) -> None:
        super().close()
        self.last, self.version, self._after = {}, "", ""


class DeltaFolderReader(FolderReader):
    """Keeps what it has received, and turns it into the next version."""

    def __init__(self, options: Mapping[str, Any], replica: int) -> None:
        super().__init__(options, replica)
        self.held: dict[int, NDArray[np.uint8]] = {}
        self._holds = ""
        self._before = ""  # the pass that this one comes to it as a delta on; empty: it comes whole

    @property
    def holds(self) -> str:
        return self._holds

    def begin(self, offer: Mapping[str, Any]) -> None:
        super().begin(offer)
        held, self._holds = self._holds, ""
        self._before = held if held == offer["before"] else ""
        if self._before:
            return
        if not offer["whole"]:
            raise SyncError(f"the actor sent a delta alone, and this rollout holds {held or 'nothing'} to apply it to")
        self.held = {}

    def receive(self, bucket: int, entries: Sequence[Entry]) -> Buffer:
        if not self._before:
            self.buffer_U = aligned_bytes(filled_bytes(entries))
            self.held[bucket] = self.buffer_U
            return super().receive(bucket, entries)
        _apply_file(_delta_path(self.folder, self.stem, bucket), self._before, self.held[bucket], entries)
        return self.held[bucket]

    def rest(self) -> None:
        self._holds = self.stem

    def close(self) -> None:
        super().close()
        self.held, self._holds = {}, ""


def _delta_path(folder: Path, stem: str, bucket: int) -> Path:
    return folder / f"{stem}-{bucket}.delta.safetensors"


def _apply_file(path: Path, before: str, held_U: NDArray[np.uint8], entries: Sequence[Entry]) -> None:
    header = wait_for_header(path)
    if header.metadata.get("before") != before:
        raise SyncError(f"{path} changes {header.metadata.get('before')}, not {before}, which this rollout holds")
    with path.open("rb", buffering=0) as file:
        for entry in entries:
            name, target_U = str(entry["name"]), bytes_of(held_U, entry)
            word_bytes = ITEM_BYTES[CODES[entry["dtype"]]]
            if (whole := header.entries.get(_WHOLE + name)) is not None:
                if whole.nbytes != len(target_U):
                    raise SyncError(f"weight {name} is not in {path} as it was announced")
                file.seek(whole.start)
                read_into(file, target_U.data, name)
            elif _GAPS + name in header.entries:
                delta = Delta(*(_stream(file, header, prefix + name, name) for prefix in (_GAPS, _VALUES)))
                apply(delta, target_U, word_bytes, name)


def _stream(file: Any, header: Header, key: str, name: str) -> bytes:
    entry = header.entries.get(key)
    if entry is None:
        raise SyncError(f"the delta of weight {name} has no {key}")
    stream = bytearray(entry.nbytes)
    file.seek(entry.start)
    read_into(file, memoryview(stream), name)
    return bytes(stream)
