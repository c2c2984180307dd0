"""The other end of a Unix socket between two processes of a host that take turns on memory that both map: a byte for
each piece that is filled or done with.

The socket also orders the memory accesses of both, and ends when either end does.
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Sequence
from types import TracebackType

from backends import activity
from specs.errors import PeerGone, PeerLate
from specs.memory_parts import BLOCKS

PATIENCE_S = 300.0  # for one piece, or one peer; one that makes no progress for so long is lost
SPIN_S = 200e-6  # before an end sleeps: one that works is done sooner, and waking takes as long on a virtual machine
_SIGNAL = b"\0"
_UNREAD = BLOCKS  # signals that an end may owe


class Reaching:
    """Context manager that turns socket errors into PeerGone or PeerLate with the peer's name."""

    def __init__(self, peer: str) -> None:
        self.peer = peer

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, ConnectionError):
            raise PeerGone(self.peer, f"left the transport ({error})") from error
        if isinstance(error, TimeoutError):
            raise PeerLate(self.peer, f"did not come to the transport within {PATIENCE_S:g} s") from error


class UnixPeer:
    """The other end, which sends one signal for each unit of the stream. `name` is what errors call it.

    All that waits for it or writes to it raises PeerGone when it has left, PeerLate when it does not continue."""

    def __init__(self, connected: socket.socket, name: str) -> None:
        connected.setblocking(False)
        self._socket, self._name, self._reaching = connected, name, Reaching(name)
        self._events = select.poll()
        self._events.register(connected, select.POLLIN)
        self._received = 0

    def send(self, signals: int) -> None:
        if signals:
            with self._reaching:
                self._socket.send(_SIGNAL * signals)  # never waits: at most _UNREAD of them are unread

    def wait_for(self, signals: int) -> None:
        """Wait until that many signals have come in this pass."""
        while self._received < signals:
            self._wait()
            with self._reaching:
                self._received += len(self._known(self._socket.recv(_UNREAD)))

    def reset(self) -> None:
        """Reset the counts at the start of a pass."""
        self._received = 0

    def send_place(self, place: bytes, descriptors: Sequence[int] = ()) -> None:
        with self._reaching:
            socket.send_fds(self._socket, [place], descriptors)

    def receive_place(self) -> tuple[bytes, list[int]]:
        """Return what the other end's `send_place` was given. Before the first signal of a pass."""
        self._wait()
        with self._reaching:
            place, descriptors, *_ = socket.recv_fds(self._socket, 1, 1)
        return self._known(place), descriptors

    def _wait(self) -> None:
        if self._spin():
            return
        with activity.waiting_for(self._name):
            ready = self._events.poll(PATIENCE_S * 1e3)
        if not ready:
            raise PeerLate(self._name, f"has not touched the transport for {PATIENCE_S:g} s")

    def _known(self, received: bytes) -> bytes:
        if not received:
            raise PeerGone(self._name, "left the transport")
        return received

    def _spin(self) -> bool:
        """Poll briefly for a signal, and yield the core to others meanwhile."""
        until = time.perf_counter() + SPIN_S
        while not self._events.poll(0):
            if time.perf_counter() > until:
                return False
            os.sched_yield()
        return True

    def close(self) -> None:
        self._socket.close()
