"""The transport through a folder that sends changes alone (`sync.delta`): for sites without a fast network.

Both ends keep the bytes that they sent or received last. Each pass has a name, that of its files. A reader says which
one it holds; the next pass is a delta on that, and a reader that missed some takes their deltas one after the other.
One that holds nothing, or something from before the deltas that are kept, gets a full copy. What is proven is the same:
each weight is handed to the engine whole, and the checksum of all of it compared.

Deltas that a reader missed are kept under a prefix of their own until nobody needs them, and no longer than they are
together smaller than a full copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backends.protocol import Buffer
from specs.errors import SyncError
from specs.safetensors_header import CODES, ITEM_BYTES, Header
from workers.transports.base import FOLDER_PREFIX, NOTHING_KNOWN, Entry, Known, filled_bytes
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


@dataclass
class _Step:
    """Write what leads from one pass to the next."""

    before: str
    after: str
    stem: str  # of its files
    files: list[Path] = field(default_factory=list)
    nbytes: int = 0
    buckets: int = 0  # sent so far


class DeltaFolderWriter(FolderWriter):
    """Writes a delta, a full copy or both of each bucket, as the readers need."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        self.last: dict[int, NDArray[np.uint8]] = {}  # each bucket as it was sent last
        self.steps: list[_Step] = []  # those kept for readers that missed them, oldest first
        self.version = ""  # the pass that `last` is
        self._now = _Step("", "", "")
        self._writes_whole = self._writes_delta = self._keeps = False
        self._buckets = 0

    def begin(
        self, sizes: Sequence[int], windows: int, readers: int, *, renew: bool, known: Known = NOTHING_KNOWN
    ) -> dict[str, Any]:
        offer = super().begin(sizes, windows, readers, renew=renew)
        if not known.alike:
            self._forget()
        self._drop_steps([*known.held, *known.absent], sum(sizes))
        reachable = {step.before for step in self.steps} | ({self.version} - {""})
        self._writes_whole = not reachable.issuperset(known.held) or not known.held
        self._keeps = not reachable.isdisjoint(known.absent)
        self._writes_delta = self._keeps or not reachable.isdisjoint(known.held)
        self._buckets = len(sizes)
        stem = offer["stem"]
        if self._keeps:
            stem = stem.replace(FOLDER_PREFIX, f"{FOLDER_PREFIX}kept-", 1)
        self._now = _Step(self.version, offer["stem"], stem)
        self.version = ""  # until all of it is sent
        chain = [*self.steps, *([self._now] if self._writes_delta else [])]
        return {**offer, "whole": self._writes_whole, "chain": [[step.before, step.stem] for step in chain]}

    def send(self, bucket: int, entries: Sequence[Entry]) -> int:
        sent = super().send(bucket, entries) if self._writes_whole else 0
        if self._writes_delta:
            path = _delta_path(self.folder, self._now.stem, bucket)
            nbytes = self._write_delta(path, self.last[bucket], entries)
            self._now.nbytes += nbytes
            sent += nbytes
            (self._now.files if self._keeps else self.files.setdefault(bucket, [])).append(path)
        self._keep_last(bucket, self.buffer_U[: filled_bytes(entries)])
        self._now.buckets += 1
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
        return write_bucket(path, kinds, data, {"before": self._now.before, "after": self._now.after})

    def _drop_steps(self, needed: Sequence[str], whole_bytes: int) -> None:
        """Keep the steps from the oldest on that some reader needs, while they are smaller than a full copy."""
        needless = next((i for i, step in enumerate(self.steps) if step.before in needed), len(self.steps))
        while sum(step.nbytes for step in self.steps[needless:]) >= whole_bytes and needless < len(self.steps):
            needless += 1
        for step in self.steps[:needless]:
            _remove(step.files)
        self.steps = self.steps[needless:]

    def _forget(self) -> None:
        self._drop_steps([], 0)
        self.last, self.version = {}, ""

    def rest(self) -> None:
        super().rest()
        if self._now.buckets and self._now.buckets == self._buckets:
            self.version = self._now.after
            self.steps.append(self._now)
            if not self._keeps:  # nobody is behind
                self._drop_steps([], 0)
        else:
            _remove(self._now.files)
        self._now = _Step("", "", "")

    def close(self) -> None:
        super().close()
        self._forget()


class DeltaFolderReader(FolderReader):
    """Keeps what it has received, and turns it into the next version."""

    def __init__(self, options: Mapping[str, Any], replica: int) -> None:
        super().__init__(options, replica)
        self.held: dict[int, NDArray[np.uint8]] = {}
        self._holds = ""
        self._steps: list[tuple[str, str]] = []  # (pass before, stem) of the deltas that lead from what is held to this

    @property
    def holds(self) -> str:
        return self._holds

    def begin(self, offer: Mapping[str, Any]) -> None:
        super().begin(offer)
        before, self._holds = self._holds, ""
        steps = [(str(old), str(stem)) for old, stem in offer["chain"]]
        known = [old for old, _ in steps]
        if before and before in known:
            self._steps = steps[known.index(before) :]
            return
        if not offer["whole"]:
            raise SyncError(
                f"the actor sent a delta alone, and this rollout holds {before or 'nothing'} to apply it to"
            )
        self._steps, self.held = [], {}

    def receive(self, bucket: int, entries: Sequence[Entry]) -> Buffer:
        if not self._steps:
            self.buffer_U = aligned_bytes(filled_bytes(entries))
            self.held[bucket] = self.buffer_U
            return super().receive(bucket, entries)
        for before, stem in self._steps:
            _apply_file(_delta_path(self.folder, stem, bucket), before, self.held[bucket], entries)
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


def _remove(files: Sequence[Path]) -> None:
    for path in files:
        path.unlink(missing_ok=True)
