"""Interface of a transport: a writer on the actor's rank 0 and a reader on each rollout. There are two kinds.

- In buckets: windows of memory that each hold a bucket in turn. The driver paces both ends, bucket by bucket.
- In blocks: a stream of small blocks, in which a weight takes as many as it needs. The ends pace each other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backends.protocol import Buffer

ALIGNMENT = 64  # bytes; keeps every tensor aligned for vector loads
FOLDER_PREFIX = "rlctl-sync-"  # prefix of files that a transport writes into a shared folder
Entry = Mapping[str, Any]  # a weight of a bucket: name, dtype, shape, nbytes, and the offset of its first byte


@dataclass(frozen=True)
class Readers:
    """The readers of a pass."""

    hosts: Sequence[Sequence[int]]  # their replicas by host, each host's in order
    renew: bool = True  # some of them are new
    held: Sequence[str] = ()  # the earlier pass that each could build on (`Reader.holds`), if any

    def __len__(self) -> int:
        return sum(map(len, self.hosts))


class Writer(ABC):
    """The end on the actor's rank 0."""

    @abstractmethod
    def begin(self, sizes: Sequence[int], windows: int, readers: Readers) -> dict[str, Any]:
        """Prepare a pass with buckets of at most `sizes` bytes; returns the offer, the JSON that readers begin
        with. `leftovers` in the offer lists {folder, prefix} of files that may stay behind when processes are killed.
        """

    def rest(self) -> None:
        """Free memory and disk space until the next pass: all readers are done."""

    @abstractmethod
    def close(self) -> None: ...


class BucketWriter(Writer):
    """Bucket b goes through window b modulo the number of windows, and the driver asks for b + windows only when every
    reader is done with b."""

    @abstractmethod
    def window(self, bucket: int) -> Buffer:
        """Return memory for a bucket, at least as long as it."""

    def send(self, bucket: int, entries: Sequence[Entry]) -> int:
        """Send the filled window to the readers, without waiting for them; return the bytes that this puts on the
        transport."""
        return filled_bytes(entries)


class BlockWriter(Writer):
    """All weights are one bucket, which readers read while it is written."""

    @abstractmethod
    def blocks(self, nbytes: int) -> Iterator[NDArray[np.uint8]]:
        """Yield memory for the `nbytes` of a weight, the next of the stream, block by block. A block goes to readers
        when the next one is requested, or the end, and comes back when all of them are done with it. Raise PeerGone
        when a reader is gone, PeerLate when one does not continue."""

    @abstractmethod
    def flush(self) -> None:
        """End the stream; return when every reader is done."""


class Reader(ABC):
    """The end on a rollout."""

    @property
    def holds(self) -> str:
        """Return the pass that it holds whole, as the writer named it; empty: none that a later one could build on."""
        return ""

    @abstractmethod
    def begin(self, offer: Mapping[str, Any]) -> None:
        """Reach the writer. Raise SyncError when this is not the way to it."""

    def rest(self) -> None:
        """Note that the last bucket has been read."""

    @abstractmethod
    def close(self) -> None: ...


class BucketReader(Reader):
    @abstractmethod
    def receive(self, bucket: int, entries: Sequence[Entry]) -> Buffer:
        """Return the bucket's bytes, each weight at its offset; valid until the next bucket but one."""


class BlockReader(Reader):
    @abstractmethod
    def blocks(self, nbytes: int) -> Iterator[NDArray[np.uint8]]:
        """Yield the next `nbytes` of the stream, divided as by the writer. A block is gone when the next one is
        requested. Raise what the writer's `blocks` raises."""

    @abstractmethod
    def flush(self) -> None:
        """End the stream: this reader is done."""


def filled_bytes(entries: Sequence[Entry]) -> int:
    """Return the bytes of a window that a bucket takes."""
    return max((int(entry["offset"]) + int(entry["nbytes"]) for entry in entries), default=0)
