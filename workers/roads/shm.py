"""The road over shared memory: a ring of blocks that both ends map. For one host, and weights in host memory.

The ring is small enough to stay in the CPU's cache: the actor fills a block while the rollouts copy and hash the ones
before it. A socket beside it carries one byte per block, "filled" from the actor and "done" from each rollout; it also
orders the memory accesses of both, and ends when either end does.
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specs.errors import SyncError
from workers.roads.base import BLOCK_BYTES, BLOCKS, BlockReader, BlockWriter
from workers.shm import Segment

PATIENCE_S = 300.0  # for one block, or one reader; a peer that stands still for so long will not go on
SPIN_S = 200e-6  # before an end sleeps: one that works is done sooner, and waking takes as long on a virtual machine
_SIGN = b"\0"


class _Peer:
    """The other end, which is told of each block by a byte. `name` is what errors call it."""

    def __init__(self, connected: socket.socket, name: str) -> None:
        connected.setblocking(False)
        self._socket, self._name = connected, name
        self._events = select.poll()
        self._events.register(connected, select.POLLIN)

    def say(self) -> None:
        self._socket.send(_SIGN)  # never waits: at most BLOCKS of them are unheard

    def hear(self) -> int:
        """Wait for at least one sign; how many came."""
        if not self._spin() and not self._events.poll(PATIENCE_S * 1e3):
            raise TimeoutError(f"Timed out: {self._name} has not touched the road for {PATIENCE_S:g} s")
        signs = self._socket.recv(BLOCKS)
        if not signs:
            raise ConnectionError(f"Connection closed by peer: {self._name} left the road")
        return len(signs)

    def _spin(self) -> bool:
        """Whether there is something to hear, soon. Others who need the core get it first."""
        until = time.perf_counter() + SPIN_S
        while not self._events.poll(0):
            if time.perf_counter() > until:
                return False
            os.sched_yield()
        return True

    def close(self) -> None:
        self._socket.close()


class ShmWriter(BlockWriter):
    """The ring is kept from pass to pass."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.segment: Segment | None = None
        self._listener: socket.socket | None = None
        self._readers: list[_Peer] = []
        self._expected = 0
        self._sent, self._done = 0, [0]  # blocks since the ring was made; by reader

    def begin(self, sizes: Sequence[int], windows: int, readers: int, *, renew: bool) -> dict[str, Any]:
        if renew or self.segment is None:
            self.close()
            self.segment = Segment.create(BLOCKS * BLOCK_BYTES)
            self._listener = _listen(_socket_path(self.segment.path), readers)
            self._expected = readers
        path = self.segment.path
        return {"ring": str(path), "leftovers": [{"folder": str(path.parent), "prefix": path.name}]}

    def blocks(self, nbytes: int) -> Iterator[NDArray[np.uint8]]:
        assert self.segment is not None, "begin comes first"
        self._meet_readers()
        for start in range(0, nbytes, BLOCK_BYTES):
            for reader, peer in enumerate(self._readers):
                while self._sent - self._done[reader] >= BLOCKS:
                    self._done[reader] += peer.hear()
            yield _block(self.segment, self._sent, nbytes - start)
            self._sent += 1
            for peer in self._readers:
                peer.say()

    def _meet_readers(self) -> None:
        if self._listener is None:
            return
        while len(self._readers) < self._expected:
            connected, _ = self._listener.accept()
            self._readers.append(_Peer(connected, f"rollout {len(self._readers)}"))
        self._sent, self._done = 0, [0] * len(self._readers)
        self._stop_listening()

    def _stop_listening(self) -> None:
        """Every reader has opened the ring, or none will: from here on no crash leaves a name behind."""
        if self._listener is not None and self.segment is not None:
            self._listener.close()
            self._listener = None
            _socket_path(self.segment.path).unlink(missing_ok=True)
            self.segment.unlink()

    def close(self) -> None:
        self._stop_listening()
        for peer in self._readers:
            peer.close()
        self._readers = []
        if self.segment is not None:
            self.segment.close()
            self.segment = None


class ShmReader(BlockReader):
    """Maps the ring once."""

    def __init__(self, options: Mapping[str, Any], replica: int) -> None:
        self.segment: Segment | None = None
        self._peer: _Peer | None = None
        self._arrived = self._read = 0  # blocks since the ring was made

    def begin(self, offer: Mapping[str, Any]) -> None:
        path = Path(offer["ring"])
        if self.segment is not None and self.segment.path == path:
            return
        self.close()
        try:
            self.segment = Segment.open(str(path), BLOCKS * BLOCK_BYTES)
            self._peer = _Peer(_connect(_socket_path(path)), "the actor")
        except (OSError, ValueError) as error:
            self.close()
            hint = 'actor and rollout must share /dev/shm; else set sync.road = "folder"'
            raise SyncError(f"the rollout cannot open the actor's shared memory {path}: {error}", hint=hint) from None

    def blocks(self, nbytes: int) -> Iterator[NDArray[np.uint8]]:
        assert self.segment is not None, "begin comes first"
        assert self._peer is not None
        for start in range(0, nbytes, BLOCK_BYTES):
            while self._arrived == self._read:
                self._arrived += self._peer.hear()
            yield _block(self.segment, self._read, nbytes - start)
            self._read += 1
            self._peer.say()

    def close(self) -> None:
        if self._peer is not None:
            self._peer.close()
            self._peer = None
        if self.segment is not None:
            self.segment.close()
            self.segment = None
        self._arrived = self._read = 0


def _block(segment: Segment, number: int, left: int) -> NDArray[np.uint8]:
    first = number % BLOCKS * BLOCK_BYTES
    return segment.bytes_U[first : first + min(BLOCK_BYTES, left)]


def _socket_path(ring: Path) -> Path:
    return ring.with_name(f"{ring.name}.socket")


def _listen(path: Path, readers: int) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.settimeout(PATIENCE_S)
    listener.bind(str(path))
    path.chmod(0o600)  # before anybody can connect
    listener.listen(readers)
    return listener


def _connect(path: Path) -> socket.socket:
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    peer.settimeout(PATIENCE_S)
    try:
        peer.connect(str(path))
    except OSError:
        peer.close()
        raise
    return peer
