"""Readers of one host behind one of them: the leader receives windows into memory that the others map.

Leader and followers meet at a Unix socket without a file: its name is known in the leader's network namespace alone,
which is what makes a host here (`host_of_this_process`), and goes with the leader however that ends. Either end makes
sure that the other is a process of the same user.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from specs.errors import PeerGone, PeerLate, SyncError
from workers.transports import unix_peer
from workers.transports.shm_segment import SharedSegment
from workers.transports.unix_peer import UnixPeer

_PAGE = 4096
_NEW, _AS_BEFORE = b"n", b"a"  # where the windows of a pass lie
_RETRY_S = 0.01


def host_of_this_process() -> str:
    """Processes that find the same text may hand each other memory. Empty: none may (not Linux)."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return ""


class HostLeader:
    """The end of the reader that receives."""

    def __init__(self, name: str, followers: int) -> None:
        self._expected, self._followers = followers, list[UnixPeer]()
        self._segment: SharedSegment | None = None
        self._count = 0
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(_abstract(name))
        self._listener.listen(followers)

    def meet(self) -> None:
        """Wait for all followers. Raises PeerLate."""
        deadline = time.monotonic() + unix_peer.PATIENCE_S
        while len(self._followers) < self._expected:
            self._listener.settimeout(max(0.0, deadline - time.monotonic()) + _RETRY_S)
            try:
                connected, _ = self._listener.accept()
            except TimeoutError:
                missing = self._expected - len(self._followers)
                why = f"did not come to the reader of their host within {unix_peer.PATIENCE_S:g} s ({missing} missing)"
                raise PeerLate("rollouts", why) from None
            if _uid_of(connected) != os.getuid():
                connected.close()
                continue
            self._followers.append(UnixPeer(connected, "a rollout of this host"))
        self._listener.close()

    def windows(self, nbytes: int, count: int) -> list[NDArray[np.uint8]]:
        """`count` windows of at least `nbytes` that all followers map, those of the last pass where they fit."""
        place, descriptors = _AS_BEFORE, list[int]()
        if self._segment is None or self._count != count or self._segment.nbytes < count * nbytes:
            if self._segment is not None:
                self._segment.close()
            self._segment, self._count = SharedSegment.create(count * max(_PAGE, -(-nbytes // _PAGE) * _PAGE)), count
            place, descriptors = _NEW, [self._segment.descriptor]
        for follower in self._followers:
            with contextlib.suppress(PeerGone):  # the driver has it named
                follower.send_place(place, descriptors)
        return _split(self._segment, count)

    def hand_on(self) -> None:
        """The next window is filled. A follower that has died is the driver's to name: the others continue."""
        for follower in self._followers:
            with contextlib.suppress(PeerGone):
                follower.send(1)

    def close(self) -> None:
        self._listener.close()
        for follower in self._followers:
            follower.close()
        self._followers = []
        if self._segment is not None:
            self._segment.close()
            self._segment = None


class HostFollower:
    """The end of a reader that maps what its host's leader has received."""

    def __init__(self, name: str, leader: str) -> None:
        """Connect, as soon as the leader listens. Raises PeerLate, SyncError."""
        self._leader = UnixPeer(_connect(name, leader), leader)
        self._segment: SharedSegment | None = None
        self._windows: list[NDArray[np.uint8]] = []
        self._received = 0

    def begin(self, count: int) -> None:
        """The windows of a pass. Raises PeerGone, PeerLate."""
        place, descriptors = self._leader.receive_place()
        if place == _NEW:
            self._unmap()
            self._segment = SharedSegment.received(descriptors)
            self._windows = _split(self._segment, count)
        self._leader.reset()
        self._received = 0

    def receive(self, bucket: int) -> NDArray[np.uint8]:
        self._received += 1
        self._leader.wait_for(self._received)
        return self._windows[bucket % len(self._windows)]

    def _unmap(self) -> None:
        self._windows = []
        if self._segment is not None:
            self._segment.close()
            self._segment = None

    def close(self) -> None:
        self._leader.close()
        self._unmap()


def _split(segment: SharedSegment, count: int) -> list[NDArray[np.uint8]]:
    size = segment.nbytes // count
    return [segment.bytes_U[i * size : (i + 1) * size] for i in range(count)]


def _connect(name: str, leader: str) -> socket.socket:
    deadline = time.monotonic() + unix_peer.PATIENCE_S
    while True:
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            peer.connect(_abstract(name))
        except (ConnectionRefusedError, BlockingIOError):  # it does not listen yet, or to so many at once
            peer.close()
            if time.monotonic() > deadline:
                raise PeerLate(leader, f"did not listen within {unix_peer.PATIENCE_S:g} s") from None
            time.sleep(_RETRY_S)
            continue
        if _uid_of(peer) != os.getuid():
            peer.close()
            raise SyncError(f"another user's process listens as {leader}")
        return peer


def _abstract(name: str) -> bytes:
    return b"\0rlctl-" + name.encode()


def _uid_of(connected: socket.socket) -> int:
    found = struct.unpack("3i", connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return int(found[1])
