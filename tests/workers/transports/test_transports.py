"""Every weight transport: whole syncs over it, five faults that must each end the run, and nothing left behind."""

from __future__ import annotations

import os
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from device_windows import without_a_gpu
from local_group import ThreadsCall
from reader_process import ReaderProcess
from syncing import build, send_instead, wire_bytes

from backends.weights.checksum import checksum_bytes
from rlctl.loop.residency import Residency
from rlctl.loop.sync import WeightSync
from rlctl.loop.weight_transport import Transport
from specs.errors import PeerGone, RlctlError, SyncError
from specs.rounding import Tolerance
from specs.wire.messages import Verb
from workers.transports import open_writer, shm, sweep
from workers.transports.base import Readers
from workers.transports.shm_segment import SharedSegment, folders

ROOT = Path(__file__).parents[3]
TINY = ROOT / "specs" / "builtin" / "tiny-digits"
TRANSPORTS = ("shm", "folder", "folder in deltas", "group", "cuda_ipc")
IN_DELTAS = " in deltas"
BUCKET_BYTES = 1 << 16


def transport_of(kind, folder):
    options = {
        "folder": {"folder": str(folder)},
        "folder in deltas": {"folder": str(folder), "delta": True},
        "group": {"address": "127.0.0.1", "device": "cpu"},
    }
    return Transport(kind.removesuffix(IN_DELTAS), kind, options.get(kind, {}))


class Roles:
    """An actor and two rollouts with their real handlers, and what a sync over a transport needs."""

    def __init__(self, dtype):
        self.dtype = dtype
        self.actor, self.rollouts, self.groups, self.vocab = build("torch", replicas=2, dtype=dtype)

    def sync(self, transport, bucket_bytes=BUCKET_BYTES):
        gap, rollout = 2e-3 if self.dtype == "fp32" else 0.15, self.groups[1]
        return WeightSync(
            self.groups[0], rollout, Residency(False, [rollout]), transport=transport, dtype=self.dtype,
            bucket_bytes=bucket_bytes, temperature=0.7, tolerance=Tolerance(gap), vocab=self.vocab,
        )  # fmt: skip

    def leave_transport(self):
        self._close_ends()
        wait(ThreadsCall.flying, 60)  # a reader that begins only now makes an end of its own
        self._close_ends()

    def _close_ends(self):
        for role, name in ((self.actor, "_exporter"), *((rollout, "_importer") for rollout in self.rollouts)):
            if (end := getattr(role, name)) is not None:
                end.close()
            setattr(role, name, None)


@pytest.fixture(scope="module", params=["fp32", "bf16"])
def both(request):
    return Roles(request.param)


@pytest.fixture(scope="module")
def fp32():
    return Roles("fp32")


@pytest.fixture(params=TRANSPORTS)
def transport(request, tmp_path, monkeypatch):
    """Afterwards neither a file of the folder nor the name of a socket may be left."""
    made, create = [], SharedSegment.create

    def noted(nbytes):
        made.append(create(nbytes))
        return made[-1]

    monkeypatch.setattr(SharedSegment, "create", noted)
    monkeypatch.setattr(shm, "BLOCK_BYTES", 4096)  # the ring turns often, and weights are cut
    without_a_gpu(monkeypatch)
    yield transport_of(request.param, tmp_path)
    assert os.listdir(tmp_path) == []
    if request.param != "group":  # its readers share memory as soon as they have met
        assert bool(made) == (request.param == "shm")
    assert not [path for folder in folders() for path in folder.glob(f"rlctl-{os.getpid()}-*")]


@pytest.fixture
def roles(fp32):
    yield fp32
    fp32.leave_transport()


# ── whole syncs ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("bucket_bytes", [1, 1 << 30])
def test_every_weight_arrives_and_again_after_a_change(both, transport, bucket_bytes):
    sync, engine = both.sync(transport, bucket_bytes), both.actor.engine
    for step in range(3):
        for parameter in engine.policy.parameters():
            parameter.data.mul_(1 + 0.001 * step)
        report = sync.run(step)
        assert report.nbytes == sum(spec.nbytes for spec in engine.weight_specs(both.dtype))
        for rollout in both.rollouts:
            for weight in engine.export_weights(both.dtype):
                held = held_bytes(rollout.engine, weight.spec.name).tobytes()
                assert held == wire_bytes(weight).tobytes(), weight.spec.name
    both.leave_transport()


def held_bytes(engine, name):
    import torch

    return engine._weights[name].detach().contiguous().flatten().view(torch.uint8).numpy()


def test_readers_started_anew_are_met_again(roles, transport):
    sync = roles.sync(transport)
    sync.run(0)
    for rollout in roles.rollouts:
        rollout.importer.close()
        rollout._importer = None
    sync.forget_readers()
    assert sync.run(1).weights > 0


# ── five faults ───────────────────────────────────────────────────────────────────────────────────


class Spoiled:
    """The actor's stream with one weight's bytes on the transport replaced: its checksum stays that of the engine."""

    def __init__(self, monkeypatch, engine, name, bytes_of):
        export = engine.export_weights

        def spoiled(dtype, form):
            for weight in export(dtype, form):
                if weight.spec.name == name:
                    send_instead(weight, bytes_of(wire_bytes(weight)))
                yield weight

        monkeypatch.setattr(engine, "export_weights", spoiled)


def entries_spoiled(monkeypatch, roles, spoil):
    """What the actor says of a bucket, spoiled on its way to driver and rollouts."""
    inner = roles.groups[0].handlers[0][Verb.EXPORT_BUCKET]

    def handler(message, emit):
        body, tensors = inner(message, emit)
        return {**body, "entries": spoil(body["entries"])}, tensors

    monkeypatch.setattr(roles.groups[0], "handlers", [{**roles.groups[0].handlers[0], Verb.EXPORT_BUCKET: handler}])


def test_dropped(roles, transport, monkeypatch):
    name = roles.actor.engine.weight_specs("fp32")[-1].name
    entries_spoiled(monkeypatch, roles, lambda entries: [entry for entry in entries if entry["name"] != name])
    with pytest.raises(SyncError, match=f"weight {name} was announced but never sent"):
        roles.sync(transport).run()


def test_swapped(roles, transport, monkeypatch):
    """Two weights of one shape change places on the transport."""
    specs = roles.actor.engine.weight_specs("fp32")
    first, second = next((a, b) for a in specs for b in specs if a.name < b.name and a.shape == b.shape)
    bytes_of = {
        weight.spec.name: wire_bytes(weight)
        for weight in roles.actor.engine.export_weights("fp32")
        if weight.spec in (first, second)
    }
    bytes_of[first.name][0] ^= 1  # a fresh model's norms are all alike; these two must not be
    for one, other in ((first, second), (second, first)):
        Spoiled(monkeypatch, roles.actor.engine, one.name, lambda _, other=other: bytes_of[other.name])
    with pytest.raises(SyncError, match=f"weight ({first.name}|{second.name}) differs"):
        roles.sync(transport).run()


def test_stale(roles, transport, monkeypatch):
    """What lies on the transport is the last step's weight."""
    sync, engine = roles.sync(transport), roles.actor.engine
    sync.run(0)
    name = engine.weight_specs("fp32")[0].name
    old_U = next(wire_bytes(weight) for weight in engine.export_weights("fp32"))
    for parameter in engine.policy.parameters():
        parameter.data.add_(0.01)
    Spoiled(monkeypatch, engine, name, lambda _: old_U)
    with pytest.raises(SyncError, match=f"weight {name} differs"):
        sync.run(1)


def test_truncated(roles, transport, monkeypatch):
    """The second half did not make it."""
    name = roles.actor.engine.weight_specs("fp32")[0].name

    def cut(buffer_U):
        buffer_U[len(buffer_U) // 2 :] = 0
        return buffer_U

    Spoiled(monkeypatch, roles.actor.engine, name, cut)
    with pytest.raises(SyncError, match=f"weight {name} differs"):
        roles.sync(transport).run()


def test_announced_shorter_than_it_is(roles, transport, monkeypatch):
    name = roles.actor.engine.weight_specs("fp32")[0].name

    def shorten(entries):
        return [{**entry, "nbytes": entry["nbytes"] - 4} if entry["name"] == name else entry for entry in entries]

    entries_spoiled(monkeypatch, roles, shorten)
    with pytest.raises(SyncError, match=f"weight {name} comes as"):
        roles.sync(transport).run()


def test_wrong_dtype(roles, transport, monkeypatch):
    specs = roles.actor.engine.weight_specs
    first = specs("fp32")[0]
    half = replace(first, dtype="bf16", nbytes=first.nbytes // 2)
    monkeypatch.setattr(roles.actor.engine, "weight_specs", lambda dtype, form: [half, *specs(dtype)[1:]])
    with pytest.raises(SyncError, match=f"weight {first.name} comes as bf16"):
        roles.sync(transport).run()


# ── nothing stays behind ──────────────────────────────────────────────────────────────────────────


def test_never_more_than_two_buckets_on_disk(roles, tmp_path, monkeypatch):
    most = []

    def look(entries):
        most.append(sum(path.stat().st_size for path in tmp_path.iterdir()))
        return entries

    entries_spoiled(monkeypatch, roles, look)
    roles.sync(transport_of("folder", tmp_path)).run()
    specs = roles.actor.engine.weight_specs("fp32")
    assert len(most) > 4
    assert max(most) < 2 * (max(BUCKET_BYTES, *(spec.nbytes for spec in specs)) + 4096)


def test_full_disk_is_told(roles, tmp_path):
    roles.sync(transport_of("folder", tmp_path)).run(0)
    roles.actor.exporter.writer.folder = tmp_path / "gone"
    with pytest.raises(RlctlError, match=r"cannot write weights to .*gone") as caught:
        roles.actor.exporter.writer.send(0, [])
    assert "sync.folder" in caught.value.hint


@pytest.mark.parametrize("transport", ["folder", "group"], indirect=True)
def test_a_killed_reader_leaves_nothing_and_another_takes_its_place(transport, warm_children):
    """The writer goes on with a new reader; the old one's death in the middle of a pass leaves no file and no hang."""
    content_U = np.random.default_rng(0).integers(0, 256, 4096, dtype=np.uint8)
    entries = [{"name": "w", "dtype": "fp32", "shape": [1024], "nbytes": 4096, "offset": 0}]
    writer = open_writer(transport.kind, transport.options)
    for _ in range(2):
        reader = ReaderProcess()
        try:
            offer = writer.begin([4096, 4096], 2, Readers([[0]]))
            begin = {"begin": offer, "transport": transport.kind, "options": dict(transport.options), "replica": 0}
            assert reader.ask(begin) == "ok"
            writer.window(0)[: len(content_U)] = content_U
            writer.send(0, entries)
            assert reader.ask({"read": 0, "entries": entries}) == [checksum_bytes(content_U)]
            writer.window(1)[: len(content_U)] = content_U
            writer.send(1, entries)  # on its way to a reader that is about to die
        finally:
            reader.end()
        if transport.kind == "group":
            with pytest.raises(PeerGone, match="a rollout is gone"):
                send_until_it_fails(writer)
        sweep(offer["leftovers"])
    writer.close()


def send_until_it_fails(writer):
    for bucket in range(50):  # the first may still fit into the connection's buffers
        writer.window(bucket % 2)
        writer.send(bucket % 2, [])


def test_sweep_takes_its_own_files_only(tmp_path):
    for name in ("rlctl-sync-a-1-0.safetensors", "rlctl-sync-b-1-0.safetensors", "other"):
        (tmp_path / name).touch()
    sweep([{"folder": str(tmp_path), "prefix": "rlctl-sync-a-"}, {"folder": str(tmp_path / "gone"), "prefix": ""}])
    assert sorted(os.listdir(tmp_path)) == ["other", "rlctl-sync-b-1-0.safetensors"]
