"""Weights that travel as changes: the same to the bit as full copies, whatever a reader has missed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends.weights.checksum import checksum_bytes
from specs.errors import SyncError
from workers.transports import open_reader, open_writer
from workers.transports.base import BucketReader, BucketWriter, Readers

WORDS = (30_000, 30_000, 500)  # of the weights; two buckets
BUCKETS = ((0,), (1, 2))


class Pass:
    """An actor's weights as bf16 words, a writer of them, and readers that take part or miss a pass."""

    def __init__(self, folder: Path, readers: int, *, delta: bool = True) -> None:
        self.options = {"folder": str(folder), "delta": delta}
        self.folder, self.rng = folder, np.random.default_rng(0)
        self.weights = [self.rng.integers(0, 2**16, words, dtype=np.uint16) for words in WORDS]
        self.writer = open_writer("folder", self.options)
        self.readers = [open_reader("folder", self.options, replica) for replica in range(readers)]
        self.offer: dict[str, Any] = {}

    def train(self, share: float = 0.02, most: int = 1) -> None:
        """An update moves this share of words by at most so much."""
        for weight in self.weights:
            moved = self.rng.random(len(weight)) < share
            weight[moved] += self.rng.integers(1, most, moved.sum(), dtype=np.uint16, endpoint=True)

    def run(self, *present: int) -> int:
        """A pass to readers; each finds the actor's bytes. Returns the bytes that were written."""
        sent, readers = 0, Readers([present], held=[self.readers[i].holds for i in present])
        assert isinstance(self.writer, BucketWriter)
        sizes = [sum(self.nbytes(i) for i in bucket) for bucket in BUCKETS]
        self.offer = self.writer.begin(sizes, 2, readers)
        for i in present:
            self.readers[i].begin(self.offer)
        for bucket, weights in enumerate(BUCKETS):
            entries, offset, window = [], 0, self.writer.window(bucket)
            for i in weights:
                entry = {"name": f"w{i}", "dtype": "bf16", "shape": [WORDS[i]], "nbytes": 2 * WORDS[i]}
                entries.append({**entry, "offset": offset})
                window[offset : offset + 2 * WORDS[i]] = self.weights[i].view(np.uint8)
                offset += self.nbytes(i)
            sent += self.writer.send(bucket, entries)
            for i in present:
                self.compare(i, bucket, entries)
        for i in present:
            self.readers[i].rest()
        self.writer.rest()
        return sent

    def compare(self, replica: int, bucket: int, entries: list[dict[str, Any]]) -> None:
        reader = self.readers[replica]
        assert isinstance(reader, BucketReader)
        window = np.asarray(reader.receive(bucket, entries))
        for entry, i in zip(entries, BUCKETS[bucket], strict=True):
            there = window[entry["offset"] : entry["offset"] + entry["nbytes"]]
            assert checksum_bytes(there) == checksum_bytes(self.weights[i].view(np.uint8)), (replica, i)

    @staticmethod
    def nbytes(weight: int) -> int:
        return -(-2 * WORDS[weight] // 64) * 64


@pytest.fixture
def told(tmp_path: Path) -> Pass:
    return Pass(tmp_path, 3)


WHOLE = 2 * sum(WORDS)


def test_twenty_steps_with_a_reader_that_misses_three(told: Pass, tmp_path: Path) -> None:
    """Equal to the full transport's at every step. Nothing is kept for it: it gets a full copy when it is back."""
    full = Pass(tmp_path / "full", 1, delta=False)
    (tmp_path / "full").mkdir()
    full.weights = told.weights
    for step in range(20):
        missing = step in (7, 8, 9)
        sent = told.run(0, 1, *(() if missing else (2,)))
        assert full.run(0) > WHOLE
        assert (sent > WHOLE) == (step in (0, 10))
        assert step in (0, 10) or sent < 0.1 * WHOLE
        assert not [path for path in tmp_path.iterdir() if path.is_file()]
        told.train()
    assert told.offer["before"]


def test_a_new_reader_gets_a_full_copy_beside_the_others_delta(told: Pass, tmp_path: Path) -> None:
    told.run(0)
    told.train()
    assert WHOLE < told.run(0, 1) < 1.1 * WHOLE
    told.train()
    assert told.run(0, 1) < 0.1 * WHOLE
    assert os.listdir(tmp_path) == []


def test_what_changed_all_over_travels_whole(told: Pass) -> None:
    told.run(0)
    told.weights[0][:] = told.rng.integers(0, 2**16, WORDS[0], dtype=np.uint16)
    assert 2 * WORDS[0] < told.run(0) < 2 * WORDS[0] + 2000
    assert told.run(0) < 1000  # nothing changed


def test_a_pass_that_was_broken_off_is_no_base(told: Pass, tmp_path: Path) -> None:
    """Both ends have a part of the next version: a full copy follows."""
    told.run(0, 1)
    told.train()
    told.readers[1].receive = lambda bucket, entries: 1 / 0
    with pytest.raises(ZeroDivisionError):
        told.run(0, 1)
    told.writer.close()
    assert os.listdir(tmp_path) == []
    told.readers[1] = open_reader("folder", told.options, 1)
    assert told.readers[0].holds == ""
    assert told.run(0, 1) > WHOLE


def test_a_delta_on_something_else_is_refused(told: Pass) -> None:
    told.run(0)
    told.train()
    reader = told.readers[1]
    with pytest.raises(SyncError, match="this rollout holds nothing"):
        reader.begin({**told.offer, "whole": False, "before": "before"})


def test_a_delta_cut_short_ends_the_sync(told: Pass, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told.run(0, 1)
    told.train()
    read_bytes = told.readers[0].receive

    def cut_short(*bucket: Any) -> Any:
        os.truncate(path := next(tmp_path.iterdir()), path.stat().st_size - 1)
        return read_bytes(*bucket)

    monkeypatch.setattr(told.readers[0], "receive", cut_short)
    with pytest.raises(SyncError, match="a bucket of weights is truncated"):
        told.run(0, 1)
