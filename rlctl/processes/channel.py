"""The driver's end of the channel: one ROUTER socket, on loopback unless ranks are on other hosts.

The driver may be busy for long (saving, plotting); its ranks still hear it, and it still notices their silence.

A connection with the run's keys introduces itself first:

rank → driver   HELLO      role, rank, start, pid, host
driver → rank   WELCOME    heartbeat interval, and how much silence counts as death; or ERROR
"""

from __future__ import annotations

import logging
import resource
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from specs.errors import ChannelError
from specs.wire.messages import Kind, Message, parse
from specs.wire.wire_tensors import Buffer

if TYPE_CHECKING:
    import zmq

log = logging.getLogger("rlctl.processes.channel")

_MAX_BEAT_S = 1.0
_SILENCE_FACTOR = 4.0  # a rank gives a silent driver longer than the driver gives a rank: it may be stopped by Ctrl-Z
_MIN_SILENCE_S = 60.0
_BURST_S = 0.05  # for messages that have arrived, before a beat that is due
_HANDSHAKE_MS = 3000  # for ZeroMQ's handshake: silent connections are closed; a rank tries again
_OPEN_FILES = 65536  # silent connections hold one each until then


@dataclass(frozen=True)
class Member:
    """A rank that has joined, as it introduced itself: the first event of each."""

    role: str
    rank: int
    pid: int
    host: str


@dataclass(frozen=True)
class Received:
    """Frames of a rank that has joined, to be parsed by `specs.wire.messages.parse`."""

    role: str
    rank: int
    frames: list[Buffer]


@dataclass(frozen=True)
class Silent:
    """A rank that has joined has given no sign of life for `seconds`."""

    role: str
    rank: int
    seconds: float


Event = Member | Received | Silent


@dataclass
class _Peer:
    member: Member
    heard: float
    reported: bool = False


class _RunKeys(NamedTuple):
    """CURVE keys of a run: the driver's, and the one pair that all its ranks use."""

    driver_public: bytes
    driver_secret: bytes
    rank_public: bytes
    rank_secret: bytes

    def callback(self, domain: str, key: bytes) -> bool:
        """Admit a client by its public key; ZeroMQ's authenticator calls this in its own thread."""
        return key == self.rank_public


class Hub:
    """Binds a free port of the address `host` at once, and of no other.

    Connections are encrypted and authenticated by CURVE: who lacks the driver's public key, or the ranks' key pair,
    gets no further than ZeroMQ's own threads, so that a flood of strangers costs the run pace and nothing else.

    `send` and `next` are for the driver's main thread, which uses the socket itself; a second thread beats and
    listens while the first is busy. One lock passes the socket between them.
    """

    def __init__(self, *, heartbeat_timeout_s: float = 30.0, host: str = "127.0.0.1") -> None:
        import zmq  # here: `rlctl --help` must not pay for it
        from zmq.auth.thread import ThreadAuthenticator

        self.heartbeat_timeout_s = heartbeat_timeout_s
        self._beat_s = min(_MAX_BEAT_S, heartbeat_timeout_s / 4)
        silence_s = max(_MIN_SILENCE_S, _SILENCE_FACTOR * heartbeat_timeout_s)
        self._welcome = Message(Kind.WELCOME, {"beat_s": self._beat_s, "silence_s": silence_s})
        self._expected: dict[tuple[str, int], int] = {}  # role, rank → how often it was started again
        _allow_open_files(_OPEN_FILES)
        self._keys = _RunKeys(*zmq.curve_keypair(), *zmq.curve_keypair())
        self._context = zmq.Context()
        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(credentials_provider=self._keys)
        self._router = _listen(self._context, self._keys, host)
        self._poller = zmq.Poller()  # kept: the socket's own `poll` makes one at every call
        self._poller.register(self._router, zmq.POLLIN)
        self.address = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self._lock = threading.Lock()  # whoever holds it may touch the socket and what follows
        self._events: deque[Event] = deque()
        self._peers: dict[bytes, _Peer] = {}
        self._identities: dict[tuple[str, int], bytes] = {}
        self._polled = self._next_beat = time.monotonic()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._stay_alive, name="channel", daemon=True)
        self._thread.start()

    def environment(self) -> dict[str, str]:
        """Return the variables by which a rank connects (`workers.connection.Dial`)."""
        return {
            "RLCTL_ADDRESS": self.address,
            "RLCTL_SECRET": self._keys.rank_secret.decode(),
            "RLCTL_CURVE_KEY": self._keys.driver_public.decode(),
        }

    def expect(self, role: str, size: int) -> None:
        """Let ranks 0 … size-1 of a role join. Nobody else may."""
        with self._lock:
            self._expected |= {(role, rank): 0 for rank in range(size)}

    def expect_no_more(self, role: str, rank: int) -> None:
        """Refuse a rank that the run continues without, unless it is connected."""
        with self._lock:
            if (role, rank) not in self._identities:
                self._expected.pop((role, rank), None)

    def send(self, role: str, rank: int, frames: list[Buffer]) -> None:
        """Send a message's frames to a rank; never waits. A rank that is gone misses it."""
        with self._lock:
            self._post(self._identities.get((role, rank)), frames)

    def forget(self, role: str, rank: int) -> int:
        """Hear nothing more of a rank that is gone; a new process may take its place. Return the number of this start,
        by which its greeting is told from one of the old process that is still on its way."""
        with self._lock:
            self._expected[role, rank] = self._expected.get((role, rank), 0) + 1
            self._peers.pop(self._identities.pop((role, rank), b""), None)
            self._events = deque(event for event in self._events if (event.role, event.rank) != (role, rank))
            return self._expected[role, rank]

    def next(self, timeout_s: float) -> Event | None:
        """Return the next event, or None when there is none in time."""
        deadline = time.monotonic() + timeout_s
        while True:
            with self._lock:
                if not self._events:
                    self._pump(deadline)
                if self._events:
                    return self._events.popleft()
            if time.monotonic() >= deadline:
                return None

    def next_queued(self) -> Event | None:
        """Return the next event of those that are here already."""
        with self._lock:
            return self._events.popleft() if self._events else None

    def is_silent(self, role: str, rank: int) -> bool:
        """Return whether a rank is connected, and has missed more than half of its time for a sign of life."""
        with self._lock:
            peer = self._peers.get(self._identities.get((role, rank), b""))
            return peer is not None and time.monotonic() - peer.heard > self.heartbeat_timeout_s / 2

    def close(self) -> None:
        """Hang up. A second call does nothing."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._thread.join(timeout=5)
        with self._lock:
            self._router.close(linger=500)
            self._authenticator.stop()
            self._context.term()

    def _stay_alive(self) -> None:
        while not self._closing.wait(self._beat_s / 2):
            # A lock that is not free is held by `next`, which pumps by itself.
            if self._lock.acquire(timeout=self._beat_s):
                try:
                    self._pump(0.0)
                finally:
                    self._lock.release()

    def _pump(self, until: float) -> None:
        """Receive what comes until the time `until` or the next beat, whichever is first, and beat when it is time."""
        from workers.connection import receive

        wait_s = min(until, self._next_beat) - time.monotonic()
        ready = self._poller.poll(int(wait_s * 1000) + 1 if wait_s > 0 else 0)
        now = time.monotonic()
        self._excuse(now - self._polled - self._beat_s)
        self._polled = now
        if ready:
            for identity, *frames in receive(self._router, _BURST_S):
                self._hear(bytes(identity), frames, now)
        if now >= self._next_beat:
            self._beat(now)
            self._next_beat = now + self._beat_s

    def _hear(self, identity: bytes, frames: list[Buffer], now: float) -> None:
        from workers.connection import BEAT_FRAMES

        peer = self._peers.get(identity)
        if peer is not None:
            peer.heard = now
            if frames != BEAT_FRAMES:
                self._events.append(Received(peer.member.role, peer.member.rank, frames))
            return
        try:
            member = self._admit(parse(frames))
        except ChannelError as error:
            log.warning("refused a connection: %s", error.message)
            self._post(identity, Message(Kind.ERROR, {"message": error.message}).frames())
            return
        self._peers[identity] = _Peer(member, now)
        self._identities[member.role, member.rank] = identity
        self._events.append(member)
        self._post(identity, self._welcome.frames())

    def _admit(self, message: Message) -> Member:
        if message.kind is not Kind.HELLO:
            raise ChannelError(f"it sent {message.kind} before its greeting")
        try:
            body = message.body
            member = Member(str(body["role"]), int(body["rank"]), int(body["pid"]), str(body["host"]))
            start = int(body["start"])
        except (KeyError, TypeError, ValueError, OverflowError):
            raise ChannelError("its greeting is incomplete") from None
        place = (member.role, member.rank)
        if place not in self._expected:
            raise ChannelError(f"this run expects no {member.role!r} rank {member.rank}")
        if start != self._expected[place]:
            raise ChannelError(f"{member.role} rank {member.rank} was started again since this process")
        if place in self._identities:
            raise ChannelError(f"{member.role} rank {member.rank} is already here")
        return member

    def _beat(self, now: float) -> None:
        from workers.connection import BEAT_FRAMES

        for identity, peer in self._peers.items():
            self._post(identity, BEAT_FRAMES)
            silent_s = now - peer.heard
            if silent_s > self.heartbeat_timeout_s and not peer.reported:
                peer.reported = True
                self._events.append(Silent(peer.member.role, peer.member.rank, silent_s))

    def _excuse(self, missed_s: float) -> None:
        """Do not count driver pauses (Ctrl-Z, a starved machine) against heartbeats."""
        if missed_s > 0:
            for peer in self._peers.values():
                peer.heard += missed_s

    def _post(self, identity: bytes | None, frames: list[Buffer]) -> None:
        import zmq

        if identity is None:
            return
        try:
            # Small frames are copied: to have ZeroMQ hold one until it is sent costs more.
            self._router.send_multipart([identity, *frames], zmq.NOBLOCK, copy=len(frames) == 1)
        except zmq.ZMQError as error:  # unroutable: the rank is gone, and its process's end is noticed elsewhere
            log.debug("a message was not delivered: %s", error)


def _listen(context: zmq.Context[zmq.Socket[bytes]], keys: _RunKeys, host: str) -> zmq.Socket[bytes]:
    import zmq

    router = context.socket(zmq.ROUTER)
    router.curve_server = True
    router.curve_secretkey = keys.driver_secret
    router.setsockopt(zmq.SNDHWM, 0)
    router.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)
    router.bind(f"tcp://{host}:*")
    return router


def _allow_open_files(count: int) -> None:
    """Raise this process's limit, often 1024, as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
