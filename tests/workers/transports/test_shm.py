"""The transport over shared memory by itself: blocks of any length to several readers, ends that go away or stand
still."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from reader_process import ReaderProcess

from backends.weights.checksum import checksum_bytes
from specs.errors import PeerGone, PeerLate
from specs.memory_parts import BLOCK_BYTES, BLOCKS
from workers.transports import sweep
from workers.transports.base import Readers
from workers.transports.shm import ShmReader, ShmWriter
from workers.transports.shm_segment import folders

RING_BYTES = BLOCKS * BLOCK_BYTES


def names_left():
    return [name for folder in folders() for name in os.listdir(folder) if name.startswith(f"rlctl-{os.getpid()}-")]


@pytest.fixture
def writer():
    made = ShmWriter({})
    yield made
    made.close()
    assert names_left() == []


def write(writer, *contents):
    """A pass of weights."""
    for content_U in contents:
        start = 0
        for block_U in writer.blocks(len(content_U)):
            block_U[:] = content_U[start : start + len(block_U)]
            start += len(block_U)
    writer.flush()


def read(reader, *sizes, pause_s=0.0):
    """A pass: the bytes of each weight."""
    contents = []
    for nbytes in sizes:
        pieces = []
        for block_U in reader.blocks(nbytes):
            time.sleep(pause_s)
            pieces.append(block_U.copy())
        contents.append(np.concatenate(pieces or [np.zeros(0, np.uint8)]))
    reader.flush()
    return contents


def random_bytes(nbytes, seed=0):
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def test_everything_reaches_every_reader_however_slow(writer):
    """Weights below, at and above a block and the ring; two passes through the same ring."""
    sizes = [1, BLOCK_BYTES, 0, BLOCK_BYTES + 1, RING_BYTES + BLOCK_BYTES, 7]
    readers = [ShmReader({}, 0), ShmReader({}, 1)]
    for again in (False, True):
        offer = writer.begin(sizes, 2, Readers([[0, 1]], renew=not again))
        for reader in readers:
            reader.begin(offer)
        contents = [random_bytes(size, seed=size + again) for size in sizes]
        with ThreadPoolExecutor(2) as pool:
            pauses = 0.0, 0.003
            reading = [
                pool.submit(read, reader, *sizes, pause_s=pause_s)
                for reader, pause_s in zip(readers, pauses, strict=True)
            ]
            write(writer, *contents)
            for one in reading:
                for got_U, sent_U in zip(one.result(150), contents, strict=True):
                    np.testing.assert_array_equal(got_U, sent_U)
        assert names_left() == [], "both have it open"
    for reader in readers:
        reader.close()


def test_no_block_is_written_again_before_every_reader_is_done(writer):
    fast, slow = ShmReader({}, 0), ShmReader({}, 1)
    offer = writer.begin([], 2, Readers([[0, 1]]))
    fast.begin(offer)
    slow.begin(offer)
    content_U = random_bytes(RING_BYTES + BLOCK_BYTES)
    with ThreadPoolExecutor(2) as pool:
        blocks = slow.blocks(len(content_U))
        writing, reading = pool.submit(write, writer, content_U), pool.submit(read, fast, len(content_U))
        first_U = next(blocks)
        time.sleep(0.1)
        assert not writing.done()
        np.testing.assert_array_equal(first_U, content_U[:BLOCK_BYTES])
        for _ in blocks:
            pass
        slow.flush()
        writing.result(150)
        np.testing.assert_array_equal(reading.result(150)[0], content_U)
    fast.close()
    slow.close()


@pytest.mark.usefixtures("warm_children")
def test_a_killed_reader_ends_the_pass_at_once_and_another_takes_its_place(writer):
    content_U = random_bytes(3 * RING_BYTES)
    for _ in range(2):
        reader = ReaderProcess()
        try:
            offer = writer.begin([], 2, Readers([[0]]))
            assert reader.ask({"begin": offer, "transport": "shm", "options": {}, "replica": 0}) == "ok"
            with ThreadPoolExecutor(1) as pool:
                reading = pool.submit(reader.ask, {"blocks": len(content_U)})
                write(writer, content_U)
                assert reading.result(150) == checksum_bytes(content_U)
        finally:
            reader.end()
        with pytest.raises(PeerGone, match="rollout 0 left the transport"):
            write(writer, content_U)
        sweep(offer["leftovers"])


@pytest.mark.usefixtures("warm_children")
def test_a_reader_that_dies_before_it_is_met_leaves_no_name(writer):
    reader = ReaderProcess()
    offer = writer.begin([], 2, Readers([[0]]))
    assert reader.ask({"begin": offer, "transport": "shm", "options": {}, "replica": 0}) == "ok"
    assert len(names_left()) == 1
    reader.end()
    sweep(offer["leftovers"])  # as the driver does after every sync
    assert names_left() == []


def test_a_reader_hears_that_the_writer_gave_up(writer):
    reader = ShmReader({}, 0)
    reader.begin(writer.begin([], 2, Readers([[0]])))
    next(writer.blocks(1))
    writer.close()
    with pytest.raises(PeerGone, match="the actor left the transport"):
        read(reader, 1)
    reader.close()


def test_standing_still_is_told_by_name(writer, monkeypatch):
    monkeypatch.setattr("workers.transports.unix_peer.PATIENCE_S", 0.1)
    reader = ShmReader({}, 0)
    reader.begin(writer.begin([], 2, Readers([[0]])))
    with pytest.raises(PeerLate, match=r"the actor has not touched the transport for 0\.1 s"):
        read(reader, 1)
    with pytest.raises(PeerLate, match="rollout 0 has not"):
        write(writer, random_bytes(RING_BYTES + 1))
    reader.close()


# ── without /dev/shm ──────────────────────────────────────────────────────────────────────────────

# What a container with a full /dev/shm sees; the mount goes with the process.
FULL = """
mount -t tmpfs -o size=64k tmpfs /dev/shm || exit 77
head -c 1M /dev/zero > /dev/shm/full 2> /dev/null
exec "$@"
"""
A_PASS = """
import os, sys
from concurrent.futures import ThreadPoolExecutor
from specs.errors import SyncError
from workers.transports.base import Readers
from workers.transports.shm import ShmReader, ShmWriter
if "without memfd" in sys.argv:
    del os.memfd_create
try:
    writer, reader = ShmWriter({}), ShmReader({}, 0)
    reader.begin(writer.begin([], 2, Readers([[0]])))
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(lambda: [block_U.tobytes() for block_U in reader.blocks(3)])
        for block_U in writer.blocks(3):
            block_U[:] = 7
        pool.submit(reader.flush)
        writer.flush()
        print(reading.result(150))
except SyncError as error:
    print(error)
"""


def in_a_full_dev_shm(*words, **env):
    new_mounts = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--mount", "--map-root-user"]
    command = [*new_mounts, "sh", "-c", FULL, "sh", sys.executable, "-c", A_PASS, *words]
    done = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, timeout=400, check=False)
    if done.returncode == 77 or done.stderr.startswith("unshare:"):
        pytest.skip(f"no mounts of its own: {done.stderr}")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_full_dev_shm_is_no_hindrance():
    assert in_a_full_dev_shm() == f"{[bytes([7] * 3)]}\n"


def test_no_room_at_all_is_told():
    told = in_a_full_dev_shm("without memfd", TMPDIR="/dev/shm")
    assert "4 MiB of shared memory are unavailable in /dev/shm: No space left on device" in told
    assert "hint: `df /dev/shm` says how full it is" in told
    assert "--shm-size" in told
