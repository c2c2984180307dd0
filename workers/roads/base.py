"""What a road is: two small ends that share windows of memory, a bucket in each in turn."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from backends.protocol import Buffer

ALIGNMENT = 64  # bytes; keeps every tensor aligned for vector loads
FOLDER_PREFIX = "rlctl-sync-"  # of every file that a road puts into a folder that others use too
Entry = Mapping[str, Any]  # a weight of a bucket: name, dtype, shape, nbytes, and the offset of its first byte


class Writer(ABC):
    """The end on the actor's rank 0. Bucket b goes through window b modulo the number of windows, and the driver asks
    for b + windows only when every reader is done with b."""

    @abstractmethod
    def begin(self, sizes: Sequence[int], windows: int, readers: int, *, renew: bool) -> dict[str, Any]:
        """Make ready for a pass of buckets of at most `sizes` bytes; returns the offer, the JSON that readers begin
        with. `renew`: some reader is new. `leftovers` in the offer lists {folder, prefix} of files that may stay behind
        when processes are killed."""

    @abstractmethod
    def window(self, bucket: int) -> Buffer:
        """Memory for a bucket, at least as long as it."""

    def send(self, bucket: int, entries: Sequence[Entry]) -> None:
        """The window is filled: let it go to the readers. Must not wait for them."""

    def rest(self) -> None:
        """Every reader has everything: let go of what the trainer or a disk may need until the next pass."""

    @abstractmethod
    def close(self) -> None: ...


class Reader(ABC):
    """The end on a rollout."""

    @abstractmethod
    def begin(self, offer: Mapping[str, Any]) -> None:
        """Raises SyncError when the writer cannot be reached this way."""

    @abstractmethod
    def receive(self, bucket: int, entries: Sequence[Entry]) -> Buffer:
        """The bucket's bytes, each weight at its offset; valid until the next bucket but one."""

    def rest(self) -> None:
        """The last bucket has been read."""

    @abstractmethod
    def close(self) -> None: ...


def filled_bytes(entries: Sequence[Entry]) -> int:
    """Bytes of a window that a bucket takes."""
    return max((int(entry["offset"]) + int(entry["nbytes"]) for entry in entries), default=0)
