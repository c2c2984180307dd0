"""The ends of a sync by themselves: each refuses what is incomplete, though the driver would see it too."""

from __future__ import annotations

import numpy as np
import pytest
from syncing import build

from backends.protocol import WeightSpec
from backends.weights.checksum import checksum_bytes
from specs.errors import PeerGone, SyncError
from specs.wire.bodies import SentWeight
from specs.wire.messages import Verb
from workers.transports.base import BucketReader, Readers
from workers.transports.ends import Exporter, Importer, to_json


class Window(BucketReader):
    """Hands out the same bytes for every bucket."""

    def __init__(self, bytes_U):
        self.bytes_U, self.rested = bytes_U, False

    def begin(self, offer):
        self.offer = offer

    def receive(self, bucket, entries):
        return self.bytes_U

    def rest(self):
        self.rested = True

    def close(self):
        pass


@pytest.fixture
def importer(tmp_path):
    _, (rollout,), groups, _ = build("fake")
    made = Importer(rollout.engine, 0, "folder", {"folder": str(tmp_path)})
    made.reader = Window(np.zeros(1 << 20, dtype=np.uint8))
    yield made
    for group in groups:
        group.call(Verb.CLOSE)


def entries_of(specs):
    return [SentWeight(**to_json(spec), checksum="", offset=0) for spec in specs]


def test_an_engine_of_host_memory_is_compared_here_and_answers_for_the_device(importer, monkeypatch):
    """The actor's end knows nothing of it: one transport, one checksum."""
    import torch

    from backends.weights.word_sum import word_sums

    window_U = torch.arange(1 << 20, dtype=torch.int32).to(torch.uint8)
    on_device, specs = Importer(importer.engine, 0, "cuda_ipc", {}), importer.engine.weight_specs()
    on_device.reader = Window(window_U)
    on_device.begin(specs, {})
    expected = word_sums([window_U[: spec.nbytes].view(torch.float32) for spec in specs])
    assert on_device.read(0, entries_of(specs)) == {s.name: sum_ for s, sum_ in zip(specs, expected, strict=True)}
    assert on_device.end() == len(specs)
    monkeypatch.setattr(importer.engine, "import_weight", lambda spec, bytes_U: checksum_bytes(bytes_U[1:]))
    with pytest.raises(SyncError, match=f"weight {specs[0].name}: what the rollout read back is not what it was given"):
        on_device.read(0, entries_of(specs))


def test_all_that_is_held_must_be_announced(importer):
    specs = importer.engine.weight_specs()
    for left_out in specs:
        with pytest.raises(SyncError, match=f"weight {left_out.name} is held by the rollout but not sent by the actor"):
            importer.begin([spec for spec in specs if spec is not left_out], {})
    with pytest.raises(SyncError, match="announced a weight twice"):
        importer.begin([*specs, specs[0]], {})
    stranger = WeightSpec("stranger", "fp32", (1,), 4)
    with pytest.raises(SyncError, match="weight stranger is sent by the actor but unknown to the rollout"):
        importer.begin([*specs, stranger], {})


def test_all_that_was_announced_must_arrive(importer):
    specs = importer.engine.weight_specs()
    for left_out in specs:
        importer.begin(specs, {})
        importer.read(0, entries_of(spec for spec in specs if spec is not left_out))
        with pytest.raises(SyncError, match=f"weight {left_out.name} did not arrive \\(1 missing\\)"):
            importer.end()
        assert not importer.reader.rested
    importer.begin(specs, {})
    checksums = importer.read(0, entries_of(specs))
    assert checksums == {spec.name: checksum_bytes(np.zeros(spec.nbytes, dtype=np.uint8)) for spec in specs}
    assert importer.end() == len(specs)


class ReaderLost(Exporter):
    """Of the actor's rank 0, whose writer finds a reader gone."""

    def __init__(self, engine, transport, options):
        super().__init__(engine, 0, transport, options)

        def lost(*asked):
            raise PeerGone("rollout 1", "left the transport")

        setattr(self.writer, "blocks" if self.in_blocks else "window", lost)


@pytest.mark.parametrize("transport", ["folder", "shm"])
def test_a_bucket_is_gathered_to_its_end_though_a_reader_is_gone(tmp_path, transport):
    """The actor's other ranks are in it: a rank 0 that gave up in the middle would leave them there."""
    actor, _, groups, _ = build("fake")
    exporter = ReaderLost(actor.engine, transport, {"folder": str(tmp_path)})
    exporter.begin("fp32", 1 << 30 if transport == "shm" else 4096, Readers([[0]]))
    walked, stream = [], exporter.stream
    exporter.stream = (walked.append(weight.spec.name) or weight for weight in stream)
    with pytest.raises(PeerGone):
        exporter.write(0)
    assert walked == [exporter.specs[index].name for index in exporter.buckets[0]]
    exporter.break_off()
    for group in groups:
        group.call(Verb.CLOSE)
