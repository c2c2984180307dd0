"""Both ends of a sync, over any transport (`workers/transports/`): buckets out of the actor, buckets into a rollout.

In buckets, two windows take turns, so that the actor fills one while the rollouts read the other, and the driver paces
both ends. In blocks, all weights are one bucket, and the ends pace each other. Either way the driver compares the
checksums (`rlctl/loop/sync.py`); data never passes through it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from backends import activity
from backends.hf.adapter_names import is_on_the_wire
from backends.protocol import Buffer, RolloutEngine, TrainEngine, Weight, WeightSpec
from backends.weights import checksum
from specs.errors import PeerGone, SyncError
from specs.schema.role_section import DType
from specs.schema.spec import TransportKind, WeightForm
from specs.wire.bodies import SentWeight, WireWeight
from workers.transports import IN_BLOCKS, checksum_of, open_reader, open_writer
from workers.transports.base import (
    ALIGNMENT,
    BlockReader,
    BlockWriter,
    BucketReader,
    BucketWriter,
    Reader,
    Readers,
    Writer,
)

WINDOWS = 2


def to_json(spec: WeightSpec) -> dict[str, Any]:
    return {"name": spec.name, "dtype": spec.dtype, "shape": list(spec.shape), "nbytes": spec.nbytes}


def spec_of(weight: WireWeight) -> WeightSpec:
    return WeightSpec(weight.name, weight.dtype, tuple(weight.shape), weight.nbytes)


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

    def __init__(self, engine: TrainEngine, rank: int, transport: TransportKind, options: Mapping[str, Any]) -> None:
        self.engine, self.rank = engine, rank
        self.in_blocks = transport in IN_BLOCKS
        self.on_device = checksum_of(transport, options) == "word_sum"
        self.writer: Writer | None = open_writer(transport, options) if rank == 0 else None
        self.stream: Iterator[Weight] = iter(())
        self.specs: Sequence[WeightSpec] = ()
        self.buckets: list[range] = []

    def begin(self, dtype: DType, bucket_bytes: int, readers: Readers, form: WeightForm = "merged") -> dict[str, Any]:
        """Start a pass over all weights. `specs` is None where they are those of the last pass and no reader is new."""
        before, self.specs = self.specs, self.engine.weight_specs(dtype, form)
        alike = self.specs == before
        everything = [range(len(self.specs))] if self.specs else []
        self.buckets = everything if self.in_blocks else plan_buckets(self.specs, self._room(bucket_bytes))
        self.stream = self.engine.export_weights(dtype, form)
        if self.writer is None:
            return {}
        sizes = [sum(_aligned(self.specs[i].nbytes) for i in bucket) for bucket in self.buckets]
        windows = min(WINDOWS, max(1, len(self.buckets)))
        return {
            "specs": None if alike and not readers.renew else [to_json(spec) for spec in self.specs],
            "buckets": len(self.buckets),
            "in_blocks": self.in_blocks,
            "offer": self.writer.begin(sizes, windows, readers if alike else replace(readers, held=())),
        }

    def _room(self, bucket_bytes: int) -> int:
        """Bytes of a bucket. On a device windows as large as the largest weight are there in any case, and few large
        buckets keep it busy; on the host small ones let both ends work at once."""
        if not self.on_device:
            return bucket_bytes
        return max(bucket_bytes, max((_aligned(spec.nbytes) for spec in self.specs), default=0))

    def write(self, bucket: int) -> dict[str, Any]:
        """Send one bucket; returns where each weight lies in it, the checksum of the engine's own tensor, how many
        bytes that put on the transport, and the seconds that hashing took."""
        hashed_s = checksum.seconds()
        entries, sent = self._write_blocks(bucket) if self.in_blocks else self._write_window(bucket)
        if bucket == len(self.buckets) - 1 and next(self.stream, None) is not None:
            raise SyncError("the actor streamed more weights than it announced")
        return {"entries": entries, "sent_bytes": sent, "checksum_s": checksum.seconds() - hashed_s}

    def _write_window(self, bucket: int) -> tuple[list[dict[str, Any]], int]:
        assert self.writer is None or isinstance(self.writer, BucketWriter)
        entries: list[dict[str, Any]] = []
        try:
            offset, window = 0, self.writer.window(bucket) if self.writer is not None else None
        except PeerGone:
            _walk(self._weights_of(bucket))
            raise
        assert window is None or isinstance(window, np.ndarray) != self.on_device
        for weight in self._weights_of(bucket):
            if window is None:
                continue
            digest = weight.copy_to(window[offset : offset + weight.spec.nbytes])
            entries.append({**to_json(weight.spec), "offset": offset, "checksum": digest})
            offset += _aligned(weight.spec.nbytes)
        sent = 0 if self.writer is None else self.writer.send(bucket, entries)
        return entries, sent

    def _write_blocks(self, bucket: int) -> tuple[list[dict[str, Any]], int]:
        assert self.writer is None or isinstance(self.writer, BlockWriter)
        sent: list[tuple[WeightSpec, str]] = []
        weights = self._weights_of(bucket)
        try:
            for weight in weights:
                if self.writer is not None:
                    blocks = self.writer.blocks(weight.spec.nbytes)
                    sent.append((weight.spec, weight.copy_in_blocks(blocks)))
            if self.writer is not None:
                self.writer.flush()
        except BaseException as error:
            self.close()  # the readers wait for bytes that will not come
            if isinstance(error, PeerGone):
                _walk(weights)
            raise
        entries = [{**to_json(spec), "checksum": digest} for spec, digest in sent]
        return entries, sum(spec.nbytes for spec, _ in sent)

    def _weights_of(self, bucket: int) -> Iterator[Weight]:
        """The bucket's weights from the engine's stream, checked against the announced specs."""
        for index in self.buckets[bucket]:
            weight = next(self.stream, None)
            if weight is None:
                raise SyncError(f"the actor's weight stream ended before {self.specs[index].name}")
            if weight.spec != self.specs[index]:
                raise SyncError(f"the actor streamed {weight.spec} where {self.specs[index]} was announced")
            yield weight
            activity.count("weight")

    def end(self) -> None:
        """End the pass: every replica has all weights."""
        self.stream = iter(())
        if self.writer is not None:
            self.writer.rest()

    def break_off(self) -> None:
        """Abort the pass because a reader is gone. The next pass must `renew`."""
        self.stream = iter(())
        self.close()

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()


def _walk(weights: Iterator[Weight]) -> None:
    """The rest of a bucket that goes nowhere: the other ranks gather in it."""
    for _ in weights:
        pass


class Importer:
    """A rollout's end."""

    def __init__(
        self, engine: RolloutEngine, replica: int, transport: TransportKind, options: Mapping[str, Any]
    ) -> None:
        self.engine = engine
        self.reader: Reader = open_reader(transport, options, replica)
        self.on_device = checksum_of(transport, options) == "word_sum"
        self.missing: set[str] = set()
        self.expected: dict[str, WeightSpec] = {}
        self.announced: Sequence[WeightSpec] = ()

    def begin(self, specs: Sequence[WeightSpec] | None, offer: Mapping[str, Any], form: WeightForm = "merged") -> None:
        """Check that the announced specs (None: those of the last pass) fit the engine, and connect to the writer."""
        if specs is not None:
            self._expect_all(specs, form)
        self.reader.begin(offer)
        self.missing = set(self.expected)

    def _expect_all(self, specs: Sequence[WeightSpec], form: WeightForm) -> None:
        held = self.engine.weight_specs()
        self.expected = {spec.name: spec for spec in held if form != "adapters" or is_on_the_wire(spec.name)}
        offered = {spec.name for spec in specs}
        if len(offered) != len(specs):
            raise SyncError("the actor announced a weight twice")
        for name in sorted(set(self.expected) - offered):
            raise SyncError(f"weight {name} is held by the rollout but not sent by the actor")
        for spec in specs:
            self._check(spec)
        self.announced = specs

    def _check(self, spec: WeightSpec) -> None:
        want = self.expected.get(spec.name)
        if want is None:
            raise SyncError(f"weight {spec.name} is sent by the actor but unknown to the rollout")
        if spec != want:
            raise SyncError(
                f"weight {spec.name} comes as {spec.dtype} {list(spec.shape)} ({spec.nbytes} bytes); "
                f"the rollout holds {want.dtype} {list(want.shape)} ({want.nbytes} bytes)"
            )

    def read(self, bucket: int, entries: Sequence[SentWeight]) -> dict[str, str]:
        """Load one bucket; returns the checksum read back from the engine for each weight. `entries` has the offset of
        each in its window; in blocks there are none: weights come as they were announced, one after the other."""
        if isinstance(self.reader, BlockReader):
            return self._read_blocks(self.reader)
        return self._read_window(bucket, entries)

    def _read_window(self, bucket: int, entries: Sequence[SentWeight]) -> dict[str, str]:
        specs = [spec_of(entry) for entry in entries]
        for spec in specs:
            self._check(spec)
        assert isinstance(self.reader, BucketReader)
        window = self.reader.receive(bucket, [entry.model_dump() for entry in entries])
        assert isinstance(window, np.ndarray) != self.on_device
        weights: list[tuple[WeightSpec, Buffer]] = []
        for spec, entry in zip(specs, entries, strict=True):
            assert entry.offset is not None, "in buckets each weight has a place"
            data = window[entry.offset : entry.offset + spec.nbytes]
            if len(data) != spec.nbytes:
                raise SyncError(f"weight {spec.name} is truncated: {len(data)} of {spec.nbytes} bytes")
            weights.append((spec, data))
        checksums = {}
        for (spec, _), checksum_read in zip(weights, self._load(weights), strict=True):
            checksums[spec.name] = checksum_read
            self.missing.discard(spec.name)
            activity.count("weight")
        return checksums

    def _load(self, weights: Sequence[tuple[WeightSpec, Buffer]]) -> Iterator[str]:
        if not self.on_device:
            for spec, buffer in weights:
                yield self.engine.import_weight(spec, buffer)
            return
        found = self.engine.import_from_device(weights)
        yield from self._load_over_host(weights) if found is None else found

    def _load_over_host(self, weights: Sequence[tuple[WeightSpec, Buffer]]) -> list[str]:
        """From a device into an engine that takes weights from host memory alone: what it reads back is compared here,
        and the sum is of what arrived."""
        from backends.weights.word_sum import wire_sums  # torch is where device memory is

        for spec, buffer in weights:
            host_U = buffer.cpu().numpy()
            if self.engine.import_weight(spec, host_U) != checksum.checksum_bytes(host_U):
                raise SyncError(f"weight {spec.name}: what the rollout read back is not what it was given")
        return wire_sums(weights)

    def _read_blocks(self, reader: BlockReader) -> dict[str, str]:
        checksums = {}
        try:
            for spec in self.announced:
                checksums[spec.name] = self.engine.import_in_blocks(spec, reader.blocks(spec.nbytes))
                activity.count("weight")
            reader.flush()
        except BaseException:
            reader.close()  # the actor waits for this reader
            raise
        self.missing -= checksums.keys()
        return checksums

    def end(self) -> int:
        """All weights must have come. Returns how many."""
        if self.missing:
            names = sorted(self.missing)
            raise SyncError(f"weight {names[0]} did not arrive ({len(names)} missing)")
        self.reader.rest()
        self.engine.finish_import()
        return len(self.expected)

    def close(self) -> None:
        self.reader.close()
