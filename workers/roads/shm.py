"""The road over shared memory: both ends map the same segments. For one host, and weights in host memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from backends.protocol import Buffer
from specs.errors import SyncError
from workers.roads.base import Entry, Reader, Writer
from workers.shm import Segment


class ShmWriter(Writer):
    """Segments are kept from pass to pass: to make, map and fault in their pages costs more than to fill them."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.segments: list[Segment] = []

    def begin(self, sizes: Sequence[int], windows: int, readers: int, *, renew: bool) -> dict[str, Any]:
        window_bytes = max(sizes, default=0)
        fits = len(self.segments) >= windows and all(segment.nbytes >= window_bytes for segment in self.segments)
        if renew or not fits:
            self.close()
            self.segments = [Segment.create(max(window_bytes, 1)) for _ in range(windows)]
        listed = [{"path": str(segment.path), "nbytes": segment.nbytes} for segment in self.segments]
        leftovers = [{"folder": str(segment.path.parent), "prefix": segment.path.name} for segment in self.segments]
        return {"segments": listed, "leftovers": leftovers}

    def window(self, bucket: int) -> Buffer:
        segment = self.segments[bucket % len(self.segments)]
        segment.unlink()  # every reader has opened it: from here on no crash leaves it behind
        return segment.bytes_U

    def close(self) -> None:
        for segment in self.segments:
            segment.close()
        self.segments = []


class ShmReader(Reader):
    """Maps each segment once."""

    def __init__(self, options: Mapping[str, Any], replica: int) -> None:
        self.segments: dict[str, Segment] = {}
        self.order: list[str] = []

    def begin(self, offer: Mapping[str, Any]) -> None:
        self.order = [segment["path"] for segment in offer["segments"]]
        for path in set(self.segments) - set(self.order):
            self.segments.pop(path).close()
        for segment in offer["segments"]:
            if segment["path"] not in self.segments:
                self.segments[segment["path"]] = _open(segment["path"], int(segment["nbytes"]))

    def receive(self, bucket: int, entries: Sequence[Entry]) -> Buffer:
        return self.segments[self.order[bucket % len(self.order)]].bytes_U

    def close(self) -> None:
        for segment in self.segments.values():
            segment.close()
        self.segments = {}


def _open(path: str, nbytes: int) -> Segment:
    try:
        return Segment.open(path, nbytes)
    except (OSError, ValueError) as error:
        hint = 'actor and rollout must share /dev/shm; else set sync.road = "folder"'
        raise SyncError(f"the rollout cannot open the actor's shared memory {path}: {error}", hint=hint) from None
