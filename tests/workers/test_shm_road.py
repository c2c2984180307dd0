"""The ring of shared memory by itself: blocks of any length to several readers, ends that go away or stand still."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from test_roads import ReaderProcess

from backends.checksum import checksum_bytes
from workers.roads import sweep
from workers.roads.shm import BLOCK_BYTES, BLOCKS, ShmReader, ShmWriter
from workers.shm import _folder

RING_BYTES = BLOCKS * BLOCK_BYTES


def names_left():
    return [name for name in os.listdir(_folder()) if name.startswith(f"rlctl-{os.getpid()}-")]


@pytest.fixture
def writer():
    made = ShmWriter({})
    yield made
    made.close()
    assert names_left() == []


def write(writer, content_U):
    start = 0
    for block_U in writer.blocks(len(content_U)):
        block_U[:] = content_U[start : start + len(block_U)]
        start += len(block_U)


def read(reader, nbytes, pause_s=0.0):
    pieces = []
    for block_U in reader.blocks(nbytes):
        time.sleep(pause_s)
        pieces.append(block_U.copy())
    return np.concatenate(pieces or [np.zeros(0, np.uint8)])


def random_bytes(nbytes, seed=0):
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def test_everything_reaches_every_reader_however_slow(writer):
    """Weights below, at and above a block and the ring; two passes through the same ring."""
    sizes = [1, BLOCK_BYTES, 0, BLOCK_BYTES + 1, RING_BYTES + BLOCK_BYTES, 7]
    readers = [ShmReader({}, 0), ShmReader({}, 1)]
    for again in (False, True):
        offer = writer.begin(sizes, 2, 2, renew=not again)
        for reader in readers:
            reader.begin(offer)
        contents = [random_bytes(size, seed=size + again) for size in sizes]
        with ThreadPoolExecutor(2) as pool:
            pauses = 0.0, 0.003
            reading = [
                pool.submit(lambda reader, pause_s: [read(reader, size, pause_s) for size in sizes], *end)
                for end in zip(readers, pauses, strict=True)
            ]
            for content_U in contents:
                write(writer, content_U)
            for one in reading:
                for got_U, sent_U in zip(one.result(30), contents, strict=True):
                    np.testing.assert_array_equal(got_U, sent_U)
        assert names_left() == [], "both have it open"
    for reader in readers:
        reader.close()


def test_no_block_is_written_again_before_every_reader_is_done(writer):
    fast, slow = ShmReader({}, 0), ShmReader({}, 1)
    offer = writer.begin([], 2, 2, renew=True)
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
        writing.result(30)
        np.testing.assert_array_equal(reading.result(30), content_U)
    fast.close()
    slow.close()


def test_a_killed_reader_ends_the_pass_at_once_and_another_takes_its_place(writer):
    content_U = random_bytes(3 * RING_BYTES)
    for _ in range(2):
        reader = ReaderProcess()
        try:
            offer = writer.begin([], 2, 1, renew=True)
            assert reader.ask({"begin": offer, "road": "shm", "options": {}, "replica": 0}) == "ok"
            with ThreadPoolExecutor(1) as pool:
                reading = pool.submit(reader.ask, {"blocks": len(content_U)})
                write(writer, content_U)
                assert reading.result(30) == checksum_bytes(content_U)
        finally:
            reader.end()
        with pytest.raises(ConnectionError, match=r"Connection (closed|reset) by peer|Broken pipe"):
            write(writer, content_U)
        sweep(offer["leftovers"])


def test_a_reader_that_dies_before_it_is_met_leaves_no_name(writer):
    reader = ReaderProcess()
    offer = writer.begin([], 2, 1, renew=True)
    assert reader.ask({"begin": offer, "road": "shm", "options": {}, "replica": 0}) == "ok"
    assert len(names_left()) == 2
    reader.end()
    sweep(offer["leftovers"])  # as the driver does after every sync
    assert names_left() == []


def test_a_reader_hears_that_the_writer_gave_up(writer):
    reader = ShmReader({}, 0)
    reader.begin(writer.begin([], 2, 1, renew=True))
    next(writer.blocks(1))
    writer.close()
    with pytest.raises(ConnectionError, match="Connection closed by peer: the actor left the road"):
        read(reader, 1)
    reader.close()


def test_standing_still_is_told_by_name(writer, monkeypatch):
    monkeypatch.setattr("workers.roads.shm.PATIENCE_S", 0.1)
    reader = ShmReader({}, 0)
    reader.begin(writer.begin([], 2, 1, renew=True))
    with pytest.raises(TimeoutError, match=r"Timed out: the actor has not touched the road for 0\.1 s"):
        read(reader, 1)
    with pytest.raises(TimeoutError, match="Timed out: rollout 0 has not"):
        write(writer, random_bytes(RING_BYTES + 1))
    reader.close()


def test_an_end_that_waits_long_sleeps(writer):
    """A spin of microseconds, then no work: 0.3 s of waiting may not cost a core."""
    reader = ShmReader({}, 0)
    reader.begin(writer.begin([], 2, 1, renew=True))
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read, reader, 1)
        for block_U in writer.blocks(1):
            before = time.process_time()
            time.sleep(0.3)
            spent_s = time.process_time() - before
            block_U[:] = 7
        assert reading.result(30).tolist() == [7]
    assert spent_s < 0.1
    reader.close()
