"""The transport over shared memory: for one host, and weights in host memory.

The rollouts copy them out of a ring of blocks that all ends map, small enough to stay in the CPU's cache: the actor
fills a block while the rollouts copy and hash the ones before it. A socket hands over the ring, and then a byte per
block, "filled" from the actor and "done" from each rollout; it also orders the memory accesses of both, and ends when
either end does.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specs.errors import SyncError
from specs.memory_parts import BLOCK_BYTES, BLOCKS
from workers.transports import unix_peer
from workers.transports.base import ALIGNMENT, BlockReader, BlockWriter, Readers
from workers.transports.shm_segment import SharedSegment, folders
from workers.transports.unix_peer import Reaching, UnixPeer

_RING = b"r"  # comes with the ring's descriptor
_MEETING = "rlctl-"  # the sockets at which ends meet begin so


class _Stream:
    """Where an end stands in the stream of a pass. Both cut it alike: a weight begins at a multiple of `ALIGNMENT`, and
    no piece of it goes beyond a block. A signal is due for each block, and for the rest at the end."""

    def __init__(self) -> None:
        self._next, self._signals = 0, 0
        self.block_end = 0  # of the block that the end has come to: a piece from here on is of the next one

    def pieces(self, nbytes: int) -> Iterator[tuple[int, int]]:
        """Yield first byte and length of each piece of the next weight; one is done with when the next is requested."""
        self._next += -self._next % ALIGNMENT
        end = self._next + nbytes
        while self._next < end:
            size = min(end - self._next, BLOCK_BYTES - self._next % BLOCK_BYTES)
            yield self._next, size
            self._next += size

    def go_on(self) -> tuple[int, int]:
        """Come to the block of the next piece; return its number, and the signals due for those that are complete since
        the last."""
        block = self._next // BLOCK_BYTES
        self.block_end = (block + 1) * BLOCK_BYTES
        due, self._signals = block - self._signals, block
        return block, due

    def finish(self) -> tuple[int, int]:
        """Do the same as `go_on`, at the end of the pass: how many blocks there were."""
        self._next += -self._next % BLOCK_BYTES
        return self.go_on()


class ShmWriter(BlockWriter):
    """The ring is kept from pass to pass."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.segment: SharedSegment | None = None
        self._listener: socket.socket | None = None
        self._meeting = Path()  # the listener's name
        self._readers: list[UnixPeer] = []
        self._expected = 0
        self._stream: _Stream | None = None  # of this pass, once all readers were met

    def begin(self, sizes: Sequence[int], windows: int, readers: Readers) -> dict[str, Any]:
        if readers.renew or self.segment is None:
            self.close()
            self.segment = SharedSegment.create(BLOCKS * BLOCK_BYTES)
            self._listener, self._meeting = _listen(len(readers))
            self._expected = len(readers)
        self._stream = None
        leftovers = [{"folder": str(self._meeting.parent), "prefix": self._meeting.name}]
        return {"meeting": str(self._meeting), "leftovers": leftovers}

    def blocks(self, nbytes: int) -> Iterator[NDArray[np.uint8]]:
        stream = self._stream or self._meet_readers()
        assert self.segment is not None
        for first, size in stream.pieces(nbytes):
            if first >= stream.block_end:
                block, signals = stream.go_on()
                self._send_and_wait(signals, block - BLOCKS + 1)
            yield _piece(self.segment, first, size)

    def flush(self) -> None:
        stream = self._stream or self._meet_readers()
        blocks, signals = stream.finish()
        self._send_and_wait(signals, blocks)

    def _send_and_wait(self, signals: int, done: int) -> None:
        """Signal the blocks that are filled, and wait until so many are done with."""
        for peer in self._readers:
            peer.send(signals)
        for peer in self._readers:
            peer.wait_for(done)

    def _meet_readers(self) -> _Stream:
        assert self.segment is not None, "begin comes first"
        if self._listener is not None:
            while len(self._readers) < self._expected:
                name = f"rollout {len(self._readers)}"
                with Reaching(name):
                    connected, _ = self._listener.accept()
                self._readers.append(UnixPeer(connected, name))
                self._readers[-1].send_place(_RING, [self.segment.descriptor])
            self._stop_listening()
        for peer in self._readers:
            peer.reset()
        self._stream = _Stream()
        return self._stream

    def _stop_listening(self) -> None:
        """Every reader is connected, or none will be: from here on no crash leaves a name behind."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
            self._meeting.unlink(missing_ok=True)

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
        self.segment: SharedSegment | None = None
        self._meeting = ""
        self._peer: UnixPeer | None = None
        self._stream = _Stream()

    def begin(self, offer: Mapping[str, Any]) -> None:
        if self._peer is None or self._meeting != offer["meeting"]:
            self.close()
            self._meet_writer(offer["meeting"])
        assert self._peer is not None
        self._peer.reset()
        self._stream = _Stream()

    def _meet_writer(self, meeting: str) -> None:
        try:
            with Reaching("the actor"):
                connected = _connect(meeting)
        except OSError as error:
            hint = 'actor and rollout must share a host and its folders; else set sync.transport = "folder"'
            raise SyncError(f"the rollout cannot reach the actor at {meeting}: {error.strerror}", hint=hint) from None
        self._peer, self._meeting = UnixPeer(connected, "the actor"), meeting

    def blocks(self, nbytes: int) -> Iterator[NDArray[np.uint8]]:
        assert self._peer is not None, "begin comes first"
        if self.segment is None:
            self.segment = SharedSegment.received(self._peer.receive_place()[1])
        for first, size in self._stream.pieces(nbytes):
            if first >= self._stream.block_end:
                block, signals = self._stream.go_on()
                self._peer.send(signals)
                self._peer.wait_for(block + 1)
            yield _piece(self.segment, first, size)

    def flush(self) -> None:
        assert self._peer is not None, "begin comes first"
        _, signals = self._stream.finish()
        self._peer.send(signals)

    def close(self) -> None:
        if self._peer is not None:
            self._peer.close()
            self._peer = None
        if self.segment is not None:
            self.segment.close()
            self.segment = None


def _piece(segment: SharedSegment, first: int, size: int) -> NDArray[np.uint8]:
    first %= BLOCKS * BLOCK_BYTES
    return segment.bytes_U[first : first + size]


def _listen(readers: int) -> tuple[socket.socket, Path]:
    """Return a socket that only this user can connect to, and its name. Raise SyncError where there is no place."""
    refused = []
    for folder in folders():
        path = folder / f"{_MEETING}{os.getpid()}-{secrets.token_hex(8)}"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.settimeout(unix_peer.PATIENCE_S)
            listener.bind(str(path))
            path.chmod(0o600)  # before any reader can connect
            listener.listen(readers)
        except OSError as error:
            listener.close()
            path.unlink(missing_ok=True)
            refused.append(f"{folder}: {error.strerror or error}")
            continue
        return listener, path
    told = "; ".join(refused) or "neither /dev/shm nor the folder of temporary files can be written to"
    raise SyncError(f"there is no place for a socket ({told})", hint='free some, or set sync.transport = "folder"')


def _connect(path: str) -> socket.socket:
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    peer.settimeout(unix_peer.PATIENCE_S)
    try:
        peer.connect(path)
    except OSError:
        peer.close()
        raise
    return peer
