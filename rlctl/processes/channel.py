"""The driver's end of the channel: one ROUTER socket, on loopback unless ranks are on other hosts.

The driver may be busy for long (saving, plotting); its ranks still hear it, and it still notices their silence.
"""

from __future__ import annotations

import logging
import resource
import secrets
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlctl.processes.door import Door
from rlctl.processes.handshake import Handshake, Member
from specs.errors import ChannelError
from specs.wire.wire_tensors import Buffer

if TYPE_CHECKING:
    import zmq

log = logging.getLogger("rlctl.processes.channel")

_MAX_BEAT_S = 1.0
_SILENCE_FACTOR = 4.0  # a rank gives a silent driver longer than the driver gives a rank: it may be stopped by Ctrl-Z
_MIN_SILENCE_S = 60.0
_BURST_S = 0.05  # for messages that have arrived, before a beat that is due
# Messages of connections without a proof that are read at a time, or twice as many as ranks are awaited; others are
# dropped.
_MAX_UNPROVEN = 64
_HANDSHAKE_MS = 3000  # for ZeroMQ's own, before the run's: silent connections are closed; a rank tries again
_OPEN_FILES = 65536  # silent connections hold one each until then


@dataclass(frozen=True)
class Joined:
    """A rank has proven itself."""

    member: Member


@dataclass(frozen=True)
class Received:
    """Frames of a proven rank, to be parsed by `specs.wire.messages.parse`."""

    role: str
    rank: int
    frames: list[Buffer]


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


class Hub:
    """Binds a free port of the address `host` at once, and of no other.

    Strangers must not cost ranks their beats. The door is shut while nobody is awaited. Connections are encrypted for
    this run's key (CURVE): whoever lacks it gets no further than ZeroMQ's own thread. Who has it still proves which
    rank it is, and is heard after the ranks.

    `send` and `next` are for the driver's main thread, which uses the socket itself; a second thread beats and
    listens while the first is busy. One lock passes the socket between them.
    """

    def __init__(
        self,
        *,
        heartbeat_timeout_s: float = 30.0,
        driver_silence_s: float | None = None,
        host: str = "127.0.0.1",
        secret: str = "",
    ) -> None:
        import zmq  # here: `rlctl --help` must not pay for it

        self.secret = secret or secrets.token_hex(32)
        self.heartbeat_timeout_s = heartbeat_timeout_s
        self._beat_s = min(_MAX_BEAT_S, heartbeat_timeout_s / 4)
        silence_s = driver_silence_s or max(_MIN_SILENCE_S, _SILENCE_FACTOR * heartbeat_timeout_s)
        self._expected: dict[str, int] = {}
        self._given_up: set[tuple[str, int]] = set()
        self._handshake = Handshake(self.secret, self._expected, {"beat_s": self._beat_s, "silence_s": silence_s})
        _allow_open_files(_OPEN_FILES)
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._server_key = _encrypt(self._router)
        self._door = Door(host)
        self.address = f"tcp://{host}:{self._door.port}"
        _listen(self._router, self._door, self.address)
        self._lock = threading.Lock()  # whoever holds it may touch the socket and what follows
        self._events: deque[Event] = deque()
        self._peers: dict[bytes, _Peer] = {}
        self._identities: dict[tuple[str, int], bytes] = {}
        self._looked = self._next_beat = time.monotonic()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._stay_alive, name="channel", daemon=True)
        self._thread.start()

    @property
    def refused(self) -> int:
        """Connections turned away so far."""
        return self._handshake.refused

    def environment(self) -> dict[str, str]:
        """What a rank needs to dial home."""
        return {"RLCTL_ADDRESS": self.address, "RLCTL_SECRET": self.secret, "RLCTL_CURVE_KEY": self._server_key}

    def expect(self, role: str, size: int) -> None:
        """Let ranks 0 … size-1 of a role in. Nobody else is."""
        with self._lock:
            self._expected[role] = size
            self._door.open()

    def expect_no_more(self, role: str, rank: int) -> None:
        """A rank is gone for good: if it is not here, it is not awaited either."""
        with self._lock:
            if (role, rank) not in self._identities:
                self._handshake.refuse(role, rank)
                self._given_up.add((role, rank))
                self._shut_if_all_are_here()

    def send(self, role: str, rank: int, frames: list[Buffer]) -> None:
        """Send a message's frames to a rank; never waits. To a rank that is gone it is lost."""
        with self._lock:
            self._post(self._identities.get((role, rank)), frames)

    def forget(self, role: str, rank: int) -> None:
        """A rank is gone for good: nothing more is heard of it, and a new process may take its place."""
        with self._lock:
            self._peers.pop(self._identities.pop((role, rank), b""), None)
            self._handshake.forget(role, rank)
            self._door.open()
            self._events = deque(event for event in self._events if _place(event) != (role, rank))

    def next(self, timeout_s: float) -> Event | None:
        """The next event, or None when there is none in time."""
        deadline = time.monotonic() + timeout_s
        while True:
            with self._lock:
                if not self._events:
                    self._pump(deadline)
                if self._events:
                    return self._events.popleft()
            if time.monotonic() >= deadline:
                return None

    def close(self) -> None:
        """Hang up. A second call does nothing."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._thread.join(timeout=5)
        with self._lock:
            self._router.close(linger=500)
            self._door.close()
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
        """Take in what comes until the time `until` or the next beat, whichever is first, and beat when it is time."""
        from workers.connection import receive

        wait_s = min(until, self._next_beat) - time.monotonic()
        ready = self._router.poll(int(wait_s * 1000) + 1 if wait_s > 0 else 0)
        now = time.monotonic()
        self._forgive(now - self._looked - self._beat_s)
        self._looked = now
        if ready:
            arrived = [(bytes(identity), frames) for identity, *frames in receive(self._router, _BURST_S)]
            proven = [one for one in arrived if one[0] in self._peers]
            unproven = [one for one in arrived if one[0] not in self._peers]
            for identity, frames in (*proven, *unproven[: max(_MAX_UNPROVEN, 2 * self._awaited)]):
                self._hear(identity, frames, now)
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
        outcome = self._handshake.hear(identity, frames)
        if outcome.member is not None:
            self._peers[identity] = _Peer(outcome.member, now)
            self._identities[outcome.member.role, outcome.member.rank] = identity
            self._events.append(Joined(outcome.member))
            self._shut_if_all_are_here()
        if outcome.reply is not None:
            self._post(identity, outcome.reply.frames())

    @property
    def _awaited(self) -> int:
        """How many ranks are still to come."""
        return sum(self._expected.values()) - len(self._given_up) - len(self._peers)

    def _shut_if_all_are_here(self) -> None:
        if not self._awaited:
            self._door.shut()

    def _beat(self, now: float) -> None:
        from workers.connection import BEAT_FRAMES

        for identity, peer in self._peers.items():
            self._post(identity, BEAT_FRAMES)
            silent_s = now - peer.heard
            if silent_s > self.heartbeat_timeout_s and not peer.reported:
                peer.reported = True
                self._events.append(Silent(peer.member.role, peer.member.rank, silent_s))

    def _forgive(self, missed_s: float) -> None:
        """Time in which this process did not listen (Ctrl-Z, a starved machine) is nobody's silence."""
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


def _place(event: Event) -> tuple[str, int]:
    who = event.member if isinstance(event, Joined) else event
    return who.role, who.rank


def _listen(router: zmq.Socket[bytes], door: Door, address: str) -> None:
    import zmq

    router.setsockopt(zmq.SNDHWM, 0)
    router.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)
    router.setsockopt(zmq.USE_FD, door.hand_over())
    router.bind(address)


def _allow_open_files(count: int) -> None:
    """Raise this process's limit, often 1024, as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _encrypt(router: zmq.Socket[bytes]) -> str:
    """Make CURVE keys for this run; returns the public one, which only its ranks are told."""
    import zmq

    if not zmq.has("curve"):
        raise ChannelError("this build of ZeroMQ cannot encrypt", hint="install a pyzmq wheel, which has CURVE")
    public, private = zmq.curve_keypair()
    router.curve_server = True
    router.curve_secretkey = private
    return public.decode()
