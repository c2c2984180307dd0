"""Both ends of the weight road over shared memory: buckets out of the actor, buckets into a rollout.

Two segments take turns, so that the actor fills one while the rollouts read the other. The driver paces both ends
and compares the checksums (`rlctl/sync.py`); data never passes through it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from backends.protocol import RolloutEngine, TrainEngine, Weight, WeightSpec
from specs.errors import SyncError
from specs.schema import DType
from workers.shm import Segment

ALIGNMENT = 64  # bytes; keeps every tensor aligned for vector loads


def to_json(spec: WeightSpec) -> dict[str, Any]:
    return {"name": spec.name, "dtype": spec.dtype, "shape": list(spec.shape), "nbytes": spec.nbytes}


def from_json(body: dict[str, Any]) -> WeightSpec:
    return WeightSpec(body["name"], body["dtype"], tuple(body["shape"]), int(body["nbytes"]))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def plan_buckets(specs: Sequence[WeightSpec], bucket_bytes: int) -> list[range]:
    """Consecutive weights per bucket, at most `bucket_bytes` each; a larger weight gets a bucket of its own."""
    buckets: list[range] = []
    start, filled = 0, 0
    for index, spec in enumerate(specs):
        size = _aligned(spec.nbytes)
        if index > start and filled + size > bucket_bytes:
            buckets.append(range(start, index))
            start, filled = index, 0
        filled += size
    if len(specs) > start:
        buckets.append(range(start, len(specs)))
    return buckets


class Exporter:
    """The actor's end. Every rank walks the stream (sharded engines gather in it); rank 0 writes."""

    def __init__(self, engine: TrainEngine, rank: int) -> None:
        self.engine, self.rank = engine, rank
        self.segments: list[Segment] = []
        self.stream: Iterator[Weight] = iter(())
        self.specs: Sequence[WeightSpec] = ()
        self.buckets: list[range] = []

    def begin(self, dtype: DType, bucket_bytes: int, renew: bool) -> dict[str, Any]:
        """Start a pass over all weights. `renew`: a reader does not know the segments yet, make new ones."""
        self.specs = self.engine.weight_specs(dtype)
        self.buckets = plan_buckets(self.specs, bucket_bytes)
        self.stream = self.engine.export_weights(dtype)
        if self.rank != 0:
            return {}
        largest = max((sum(_aligned(self.specs[i].nbytes) for i in bucket) for bucket in self.buckets), default=0)
        if renew or any(segment.nbytes < largest for segment in self.segments) or not self.segments:
            self.close()
            self.segments = [Segment.create(max(largest, 1)) for _ in range(min(2, max(1, len(self.buckets))))]
        return {
            "specs": [to_json(spec) for spec in self.specs],
            "buckets": len(self.buckets),
            "segments": [{"path": str(segment.path), "nbytes": segment.nbytes} for segment in self.segments],
        }

    def write(self, bucket: int) -> dict[str, Any]:
        """Fill one bucket; returns where each weight lies and the checksum of the engine's own tensor."""
        entries = []
        offset = 0
        for index in self.buckets[bucket]:
            weight = next(self.stream, None)
            if weight is None:
                raise SyncError(f"the actor's weight stream ended before {self.specs[index].name}")
            if weight.spec != self.specs[index]:
                raise SyncError(f"the actor streamed {weight.spec} where {self.specs[index]} was announced")
            if self.rank != 0:
                continue
            segment = self.segments[bucket % len(self.segments)]
            segment.unlink()
            weight.copy_to(segment.bytes_U[offset : offset + weight.spec.nbytes])
            entries.append({**to_json(weight.spec), "offset": offset, "checksum": weight.checksum()})
            offset += _aligned(weight.spec.nbytes)
        last = bucket == len(self.buckets) - 1
        if last and next(self.stream, None) is not None:
            raise SyncError("the actor streamed more weights than it announced")
        return {"entries": entries}

    def close(self) -> None:
        for segment in self.segments:
            segment.close()
        self.segments = []


class Importer:
    """A rollout's end."""

    def __init__(self, engine: RolloutEngine) -> None:
        self.engine = engine
        self.segments: dict[str, Segment] = {}
        self.missing: set[str] = set()
        self.expected: dict[str, WeightSpec] = {}
        self.order: list[str] = []

    def begin(self, specs: Sequence[WeightSpec], segments: Sequence[dict[str, Any]]) -> None:
        """Check that what will come is what this engine holds, and map the segments."""
        self.expected = {spec.name: spec for spec in self.engine.weight_specs()}
        offered = {spec.name for spec in specs}
        if len(offered) != len(specs):
            raise SyncError("the actor announced a weight twice")
        for name in sorted(set(self.expected) - offered):
            raise SyncError(f"weight {name} is held by the rollout but not sent by the actor")
        for spec in specs:
            self._check(spec)
        self.order = [segment["path"] for segment in segments]
        for path in set(self.segments) - set(self.order):
            self.segments.pop(path).close()
        for segment in segments:
            if segment["path"] not in self.segments:
                self.segments[segment["path"]] = Segment.open(segment["path"], int(segment["nbytes"]))
        self.missing = set(self.expected)

    def _check(self, spec: WeightSpec) -> None:
        want = self.expected.get(spec.name)
        if want is None:
            raise SyncError(f"weight {spec.name} is sent by the actor but unknown to the rollout")
        if spec != want:
            raise SyncError(
                f"weight {spec.name} comes as {spec.dtype} {list(spec.shape)} ({spec.nbytes} bytes); "
                f"the rollout holds {want.dtype} {list(want.shape)} ({want.nbytes} bytes)"
            )

    def read(self, bucket: int, entries: Sequence[dict[str, Any]]) -> dict[str, str]:
        """Load one bucket; returns the checksum read back from the engine for each weight."""
        segment = self.segments[self.order[bucket % len(self.order)]]
        checksums = {}
        for entry in entries:
            spec, offset = from_json(entry), int(entry["offset"])
            self._check(spec)
            data = segment.bytes_U[offset : offset + spec.nbytes]
            if len(data) != spec.nbytes:
                raise SyncError(f"weight {spec.name} is truncated: {len(data)} of {spec.nbytes} bytes")
            checksums[spec.name] = self.engine.import_weight(spec, data)
            self.missing.discard(spec.name)
        return checksums

    def end(self) -> int:
        """All weights must have come. Returns how many."""
        if self.missing:
            names = sorted(self.missing)
            raise SyncError(f"weight {names[0]} did not arrive ({len(names)} missing)")
        self.engine.finish_import()
        return len(self.expected)

    def close(self) -> None:
        for segment in self.segments.values():
            segment.close()
        self.segments = {}
