"""The transport within one GPU: the rollout maps the actor's device memory (CUDA IPC), without a copy through the host.

The windows exist only during a sync: a reader lets go of its mapping when it has read the last bucket, then the writer
of the memory. `auto` does not choose it: such memory cannot lie in expandable segments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from backends.protocol import Buffer
from backends.weights.device_memory import MappedWindows, SharedWindows
from workers.transports.base import BucketReader, BucketWriter, Entry, Readers


class CudaIpcWriter(BucketWriter):
    """Owns the windows."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.windows: SharedWindows | None = None

    def begin(self, sizes: Sequence[int], windows: int, readers: Readers) -> dict[str, Any]:
        self.rest()
        self.windows = SharedWindows(max(sizes, default=0), windows)
        return {**self.windows.handles(), "leftovers": []}

    def window(self, bucket: int) -> Buffer:
        assert self.windows is not None, "begin comes first"
        return self.windows.window(bucket)

    def send(self, bucket: int, entries: Sequence[Entry]) -> int:
        assert self.windows is not None, "begin comes first"
        self.windows.finish_writing()
        return super().send(bucket, entries)

    def rest(self) -> None:
        if self.windows is not None:
            self.windows.close()
        self.windows = None

    close = rest


class CudaIpcReader(BucketReader):
    """Maps the windows for the length of a sync."""

    def __init__(self, options: Mapping[str, Any], replica: int) -> None:
        self.windows: MappedWindows | None = None

    def begin(self, offer: Mapping[str, Any]) -> None:
        self.rest()
        self.windows = MappedWindows(offer)

    def receive(self, bucket: int, entries: Sequence[Entry]) -> Buffer:
        assert self.windows is not None, "begin comes first"
        return self.windows.window(bucket)

    def rest(self) -> None:
        if self.windows is not None:
            self.windows.close()
        self.windows = None

    close = rest
