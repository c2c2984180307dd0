"""The driver's end of the channel: one ROUTER socket on loopback, owned by a thread that beats and listens.

The driver may be busy for long (saving, plotting); its ranks still hear it, and it still notices their silence.
"""

from __future__ import annotations

import logging
import os
import queue
import secrets
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rlctl.admission import Admission, Member
from specs.errors import ChannelError

if TYPE_CHECKING:
    import zmq

log = logging.getLogger("rlctl.channel")

_MAX_BEAT_S = 1.0
_SILENCE_FACTOR = 4.0  # a rank gives a silent driver longer than the driver gives a rank: it may be stopped by Ctrl-Z
_MIN_SILENCE_S = 60.0


@dataclass(frozen=True)
class Joined:
    """A rank has proven itself."""

    member: Member


@dataclass(frozen=True)
class Received:
    """Frames of a proven rank, to be parsed by `specs.messages.parse`."""

    role: str
    rank: int
    frames: list[bytes]


@dataclass(frozen=True)
class Silent:
    """A proven rank has given no sign of life for `seconds`."""

    role: str
    rank: int
    seconds: float


Event = Joined | Received | Silent


@dataclass
class _Peer:
    member: Member
    heard: float
    reported: bool = False


@dataclass
class _Books:
    """What the socket's thread knows."""

    by_identity: dict[bytes, _Peer] = field(default_factory=dict)
    identities: dict[tuple[str, int], bytes] = field(default_factory=dict)


class Hub:
    """Binds a port on 127.0.0.1 at once. `curve=True` encrypts, for ranks that are not on this host's loopback."""

    def __init__(
        self,
        *,
        heartbeat_timeout_s: float = 30.0,
        driver_silence_s: float | None = None,
        curve: bool = False,
        secret: str = "",
    ) -> None:
        import zmq  # here: `rlctl --help` must not pay for it

        self.secret = secret or secrets.token_hex(32)
        self.heartbeat_timeout_s = heartbeat_timeout_s
        self._beat_s = min(_MAX_BEAT_S, heartbeat_timeout_s / 4)
        silence_s = driver_silence_s or max(_MIN_SILENCE_S, _SILENCE_FACTOR * heartbeat_timeout_s)
        self._expected: dict[str, int] = {}
        self._admission = Admission(self.secret, self._expected, {"beat_s": self._beat_s, "silence_s": silence_s})
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._outbox: deque[tuple[str, int, list[bytes]]] = deque()
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._server_key = _encrypt(self._router) if curve else ""
        port = _bind(self._router)
        self.address = f"tcp://127.0.0.1:{port}"
        self._wake_out, self._wake_in = os.pipe()
        os.set_blocking(self._wake_out, False)
        os.set_blocking(self._wake_in, False)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="channel", daemon=True)
        self._thread.start()

    @property
    def refused(self) -> int:
        """Connections turned away so far."""
        return self._admission.refused

    def environment(self) -> dict[str, str]:
        """What a rank needs to dial home."""
        curve = {"RLCTL_CURVE_KEY": self._server_key} if self._server_key else {}
        return {"RLCTL_ADDRESS": self.address, "RLCTL_SECRET": self.secret, **curve}

    def expect(self, role: str, size: int) -> None:
        """Let ranks 0 … size-1 of a role in. Nobody else is."""
        self._expected[role] = size

    def send(self, role: str, rank: int, frames: list[bytes]) -> None:
        """Queue a message's frames for a rank; returns at once. To a rank that is gone it is lost."""
        self._outbox.append((role, rank, frames))
        self._wake()

    def next(self, timeout_s: float) -> Event | None:
        """The next event, or None when there is none in time."""
        try:
            return self._events.get(timeout=timeout_s) if timeout_s > 0 else self._events.get_nowait()
        except queue.Empty:
            return None

    def close(self) -> None:
        """Hang up. A second call does nothing."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._wake()
        self._thread.join(timeout=5)
        os.close(self._wake_in)
        os.close(self._wake_out)

    def _wake(self) -> None:
        from workers.channel import wake

        wake(self._wake_in)

    # ── the socket's thread ───────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        import zmq

        from workers.channel import drain, receive_all

        books = _Books()
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._wake_out, zmq.POLLIN)
        looked = next_beat = time.monotonic()
        while not self._closing.is_set():
            ready = dict(poller.poll(int(max(0.0, next_beat - time.monotonic()) * 1000) + 1))
            now = time.monotonic()
            _forgive(books, now - looked - 2 * self._beat_s)
            looked = now
            if self._router in ready:
                for identity, *frames in receive_all(self._router):
                    self._hear(books, identity, frames, now)
            if self._wake_out in ready:
                drain(self._wake_out)
            while self._outbox:
                role, rank, frames = self._outbox.popleft()
                self._post(books.identities.get((role, rank)), frames)
            if now >= next_beat:
                self._beat(books, now)
                next_beat = now + self._beat_s
        self._router.close(linger=500)
        self._context.term()

    def _hear(self, books: _Books, identity: bytes, frames: list[bytes], now: float) -> None:
        from workers.channel import BEAT_FRAMES

        peer = books.by_identity.get(identity)
        if peer is not None:
            peer.heard = now
            if frames != BEAT_FRAMES:
                self._events.put(Received(peer.member.role, peer.member.rank, frames))
            return
        verdict = self._admission.hear(identity, frames)
        if verdict.member is not None:
            books.by_identity[identity] = _Peer(verdict.member, now)
            books.identities[verdict.member.role, verdict.member.rank] = identity
            self._events.put(Joined(verdict.member))
        if verdict.reply is not None:
            self._post(identity, verdict.reply.frames())

    def _beat(self, books: _Books, now: float) -> None:
        from workers.channel import BEAT_FRAMES

        for identity, peer in books.by_identity.items():
            self._post(identity, BEAT_FRAMES)
            silent_s = now - peer.heard
            if silent_s > self.heartbeat_timeout_s and not peer.reported:
                peer.reported = True
                self._events.put(Silent(peer.member.role, peer.member.rank, silent_s))

    def _post(self, identity: bytes | None, frames: list[bytes]) -> None:
        import zmq

        if identity is None:
            return
        try:
            self._router.send_multipart([identity, *frames], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:  # unroutable: the rank is gone, and its process's end is noticed elsewhere
            log.debug("a message was not delivered: %s", error)


def _forgive(books: _Books, missed_s: float) -> None:
    """Time in which this thread did not listen (Ctrl-Z, a starved machine) is nobody's silence."""
    if missed_s > 0:
        for peer in books.by_identity.values():
            peer.heard += missed_s


def _bind(router: zmq.Socket[bytes]) -> int:
    import zmq

    router.setsockopt(zmq.SNDHWM, 0)
    router.setsockopt(zmq.RCVHWM, 0)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)
    return router.bind_to_random_port("tcp://127.0.0.1")


def _encrypt(router: zmq.Socket[bytes]) -> str:
    """Make CURVE keys for this run; returns the public one. Who connects is proven by the secret, as without CURVE."""
    import zmq

    if not zmq.has("curve"):
        raise ChannelError("this build of ZeroMQ cannot encrypt", hint="install a pyzmq wheel, which has CURVE")
    public, private = zmq.curve_keypair()
    router.curve_server = True
    router.curve_secretkey = private
    return public.decode()
