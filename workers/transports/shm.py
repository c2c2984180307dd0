"""The transport over shared memory: for one host, and weights in host memory.

If there is one rollout and its engine can share the memory of its weights, the actor writes there: a single copy.
Others copy them out of a ring of blocks that all ends map, small enough to stay in the CPU's cache: the actor fills a
block while the rollouts copy and hash the ones before it. A socket hands over the ring, and then a byte per block or
few, "filled" from the actor and "done" from each rollout; it also orders the memory accesses of both, and ends when
either end does.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backends.memory import borrow
from backends.protocol import WeightMemory
from specs.errors import SyncError
from specs.memory_parts import BLOCK_BYTES, BLOCKS
from workers.transports import unix_peer
from workers.transports.base import ALIGNMENT, NOTHING_KNOWN, BlockReader, BlockWriter, Known, Share
from workers.transports.shm_segment import SharedSegment, folders
from workers.transports.unix_peer import Reaching, UnixPeer

BLOCKS_PER_SIGNAL = 4  # in memory of the reader, where no block is written twice: a signal costs a tenth of a block
_RING, _HERE, _AS_BEFORE = b"r", b"h", b"a"  # where a lone reader wants the weights of this pass
_MEETING = "rlctl-"  # the sockets at which ends meet begin so


class _Stream:
    """Where an end stands in the stream of a pass. Both cut it alike: a weight begins at a multiple of `ALIGNMENT`, and
    no piece of it goes beyond a block. A signal is due for each unit of `unit_bytes`, and for the rest at the end."""

    def __init__(self, unit_bytes: int) -> None:
        self._unit_bytes, self._next, self._signals = unit_bytes, 0, 0
        self.unit_end = 0  # of the unit that the end has come to: a piece from here on is of the next one

    def pieces(self, nbytes: int) -> Iterator[tuple[int, int]]:
        """(first byte, bytes) of each piece of the next weight; the end has gone on when it asks for the one after."""
        self._next += -self._next % ALIGNMENT
        end = self._next + nbytes
        while self._next < end:
            size = min(end - self._next, BLOCK_BYTES - self._next % BLOCK_BYTES)
            yield self._next, size
            self._next += size

    def go_on(self) -> tuple[int, int]:
        """To the unit of the next piece: its number, and the signals due for those that are complete since the last."""
        unit = self._next // self._unit_bytes
        self.unit_end = (unit + 1) * self._unit_bytes
        due, self._signals = unit - self._signals, unit
        return unit, due

    def finish(self) -> tuple[int, int]:
        """Do the same as `go_on`, at the end of the pass: how many units there were."""
        self._next += -self._next % self._unit_bytes
        return self.go_on()


class _Mapped:
    """Memory of a reader, mapped by the writer. Mapping takes longer than a pass, so it stays mapped."""

    def __init__(self, memory: int, table: int) -> None:
        with os.fdopen(table, encoding="utf-8") as file:
            file.seek(0)
            self._place: Mapping[str, int] = json.load(file)
        self._memory = SharedSegment.received([memory])
        borrow(self._memory.nbytes)

    def of(self, name: str, nbytes: int) -> NDArray[np.uint8]:
        first = self._place[name]
        return self._memory.bytes_U[first : first + nbytes]

    def close(self) -> None:
        borrow(-self._memory.nbytes)
        self._memory.close()


class ShmWriter(BlockWriter):
    """The ring is kept from pass to pass."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.segment: SharedSegment | None = None
        self._listener: socket.socket | None = None
        self._meeting = Path()  # the listener's name
        self._readers: list[UnixPeer] = []
        self._expected = 0
        self._shared: _Mapped | None = None
        self._stream: _Stream | None = None  # of this pass, once all readers were met

    def begin(
        self, sizes: Sequence[int], windows: int, readers: int, *, renew: bool, known: Known = NOTHING_KNOWN
    ) -> dict[str, Any]:
        if renew or self.segment is None:
            self.close()
            self.segment = SharedSegment.create(BLOCKS * BLOCK_BYTES)
            self._listener, self._meeting = _listen(readers)
            self._expected = readers
        self._stream = None
        leftovers = [{"folder": str(self._meeting.parent), "prefix": self._meeting.name}]
        return {"meeting": str(self._meeting), "alone": self._expected == 1, "leftovers": leftovers}

    def blocks(self, name: str, nbytes: int) -> Iterator[NDArray[np.uint8]]:
        stream = self._stream or self._meet_readers()
        assert self.segment is not None
        place_U = None if self._shared is None else self._shared.of(name, nbytes)
        start = 0
        for first, size in stream.pieces(nbytes):
            if first >= stream.unit_end:
                unit, signals = stream.go_on()
                self._send_and_wait(signals, unit - BLOCKS + 1)
            yield _piece(self.segment, first, size) if place_U is None else place_U[start : start + size]
            start += size

    def flush(self) -> None:
        stream = self._stream or self._meet_readers()
        units, signals = stream.finish()
        self._send_and_wait(signals, units)

    def _send_and_wait(self, signals: int, done: int) -> None:
        """Tell of the units that are filled, and wait until so many are done with."""
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
        if self._expected == 1:
            self._learn_place(*self._readers[0].receive_place())
        self._stream = _stream(in_place=self._shared is not None)
        return self._stream

    def _learn_place(self, place: bytes, descriptors: Sequence[int]) -> None:
        if place == _AS_BEFORE:
            return
        if self._shared is not None:
            self._shared.close()
        self._shared = _Mapped(*descriptors) if place == _HERE else None

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
        for memory in (self._shared, self.segment):
            if memory is not None:
                memory.close()
        self._shared = self.segment = None


class ShmReader(BlockReader):
    """Maps the ring once."""

    def __init__(self, options: Mapping[str, Any], replica: int) -> None:
        self.segment: SharedSegment | None = None
        self._meeting = ""
        self._peer: UnixPeer | None = None
        self._shared: WeightMemory | None = None  # the engine's memory, as offered to the writer
        self._stream = _stream(in_place=False)

    @property
    def in_place(self) -> bool:
        return self._shared is not None

    def begin(self, offer: Mapping[str, Any], share: Share = lambda: None) -> None:
        if self._peer is None or self._meeting != offer["meeting"]:
            self.close()
            self._meet_writer(offer["meeting"])
        assert self._peer is not None
        self._peer.reset()
        if offer["alone"]:  # else the writer's copies would be one after the other
            self._send_place(self._peer, share())
        self._stream = _stream(in_place=self.in_place)

    def _meet_writer(self, meeting: str) -> None:
        try:
            with Reaching("the actor"):
                connected = _connect(meeting)
        except OSError as error:
            hint = 'actor and rollout must share a host and its folders; else set sync.transport = "folder"'
            raise SyncError(f"the rollout cannot reach the actor at {meeting}: {error.strerror}", hint=hint) from None
        self._peer, self._meeting = UnixPeer(connected, "the actor"), meeting

    def _send_place(self, peer: UnixPeer, shared: WeightMemory | None) -> None:
        if shared is None:
            peer.send_place(_RING)
        elif shared is self._shared:
            peer.send_place(_AS_BEFORE)
        else:
            with os.fdopen(os.memfd_create("rlctl-places"), "w", encoding="utf-8") as table:
                json.dump(dict(shared.place), table)
                table.flush()
                peer.send_place(_HERE, [shared.descriptor, table.fileno()])
        self._shared = shared

    def blocks(self, nbytes: int) -> Iterator[NDArray[np.uint8]]:
        for first, size in self._arriving(nbytes):
            assert self.segment is not None
            yield _piece(self.segment, first, size)

    def arrivals(self, nbytes: int) -> Iterator[int]:
        return (size for _, size in self._arriving(nbytes))

    def _arriving(self, nbytes: int) -> Iterator[tuple[int, int]]:
        assert self._peer is not None, "begin comes first"
        if self.segment is None:
            self.segment = SharedSegment.received(self._peer.receive_place()[1])
        for first, size in self._stream.pieces(nbytes):
            if first >= self._stream.unit_end:
                unit, signals = self._stream.go_on()
                self._peer.send(signals)
                self._peer.wait_for(unit + 1)
            yield first, size

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
        self._shared = None


def _stream(*, in_place: bool) -> _Stream:
    return _Stream(BLOCKS_PER_SIGNAL * BLOCK_BYTES if in_place else BLOCK_BYTES)


def _piece(segment: SharedSegment, first: int, size: int) -> NDArray[np.uint8]:
    first %= BLOCKS * BLOCK_BYTES
    return segment.bytes_U[first : first + size]


def _listen(readers: int) -> tuple[socket.socket, Path]:
    """A socket that only this user can connect to, and its name. Raises SyncError."""
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
