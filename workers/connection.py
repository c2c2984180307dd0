"""The connection of a rank to the driver.

The serving thread sends and receives by itself, which saves two thread switches per message. A second thread sends
heartbeats and receives while the first computes. Any thread may send. One lock guards the socket; who sends while
another waits for messages with the lock in hand ends that wait.
"""

from __future__ import annotations

import faulthandler
import os
import socket
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass

import zmq

from backends import activity, flight_recorder
from backends.weights import lost_peers
from specs.errors import ChannelError
from specs.wire.messages import Kind, Message, parse
from specs.wire.wire_tensors import Buffer
from workers.watchdog import EXIT_ORPHANED

BEAT_FRAMES = Message(Kind.BEAT).frames()
JOIN_TIMEOUT_S = 60.0
_LINGER_S = 5.0
_SMALL_BYTES = 65536
_LOCK_S = 0.002


@dataclass(frozen=True)
class Dial:
    """Address of the driver, and the CURVE keys by which driver and rank authenticate each other."""

    address: str
    secret: str  # CURVE secret key of this run's ranks
    role: str
    rank: int
    server_key: str  # CURVE public key of the driver, which only this run's ranks know
    start: int = 0  # how often the rank was started before

    @classmethod
    def from_env(cls, role: str, rank: int) -> Dial:
        """Read RLCTL_ADDRESS, RLCTL_SECRET and RLCTL_CURVE_KEY, and remove the keys from the environment, so that
        processes started from here do not inherit them."""
        try:
            address, secret = os.environ["RLCTL_ADDRESS"], os.environ.pop("RLCTL_SECRET")
            server_key = os.environ.pop("RLCTL_CURVE_KEY")
        except KeyError as error:
            raise ChannelError(f"{error.args[0]} is not set", hint="a rank is started by `rlctl train`") from None
        return cls(address, secret, role, rank, server_key, int(os.environ.get("RLCTL_START", "0")))


class Link:
    """Connection to the driver. `receive` is for the serving thread, `send` for any."""

    def __init__(self, dial: Dial) -> None:
        self._dial = dial
        self._context = zmq.Context()
        self._dealer = self._context.socket(zmq.DEALER)
        self._poller = zmq.Poller()  # kept: the socket's own `poll` makes one at every call
        self._poller.register(self._dealer, zmq.POLLIN)
        self._lock = threading.Lock()  # guards the socket and the fields below
        self._inbox: deque[Message | ChannelError] = deque()
        self._outbox: deque[list[Buffer]] = deque()
        self._waiting = False  # `receive` holds the lock, and nothing has come yet
        self._awake, self._wakes = socket.socketpair()
        for end in (self._awake, self._wakes):
            end.setblocking(False)
        self._poller.register(self._awake.fileno(), zmq.POLLIN)
        self._beat_s = self._silence_s = self._heard = self._polled = self._next_beat = 0.0
        self._closing = threading.Event()

    def connect(self, timeout_s: float = JOIN_TIMEOUT_S) -> None:
        """Connect and introduce this rank. Raise ChannelError if the driver refuses it or does not reply."""
        dial, dealer = self._dial, self._dealer
        dealer.setsockopt(zmq.SNDHWM, 0)
        dealer.setsockopt(zmq.RCVHWM, 0)
        secret = dial.secret.encode()
        dealer.curve_publickey, dealer.curve_secretkey = zmq.curve_public(secret), secret
        dealer.curve_serverkey = dial.server_key.encode()
        dealer.connect(dial.address)
        who = {"role": dial.role, "rank": dial.rank, "start": dial.start}
        greeting = Message(Kind.HELLO, {**who, "pid": os.getpid(), "host": socket.gethostname()})
        dealer.send_multipart(greeting.frames())
        if not dealer.poll(int(timeout_s * 1000)):
            raise ChannelError(f"the driver at {dial.address} did not send {Kind.WELCOME} in {timeout_s:g} s")
        welcome = parse([*dealer.recv_multipart()])
        if welcome.kind is Kind.ERROR:
            raise ChannelError(f"the driver refused this rank: {welcome.body.get('message', '')}")
        if welcome.kind is not Kind.WELCOME:
            raise ChannelError(f"expected {Kind.WELCOME}, received {welcome.kind}")
        self._beat_s, self._silence_s = float(welcome.body["beat_s"]), float(welcome.body["silence_s"])
        self._heard = self._polled = self._next_beat = time.monotonic()
        threading.Thread(target=self._stay_alive, name="channel", daemon=True).start()

    def receive(self) -> Message:
        """Return the next message. Wait as long as the driver is alive; if it falls silent, end the process."""
        while (message := self._next(wait=True)) is None:
            pass
        return message

    def received(self) -> Message | None:
        """Return the next message that is here already."""
        return self._next(wait=False)

    def _next(self, *, wait: bool) -> Message | None:
        with self._lock:
            if not self._inbox:
                self._pump(wait=wait)
            message = self._inbox.popleft() if self._inbox else None
        if isinstance(message, ChannelError):
            raise message
        return message

    def send(self, message: Message) -> None:
        """Send at once. Raise the error of the encoding (a body that is not JSON)."""
        self._outbox.append(message.frames())
        if self._waiting:  # what waits sends it: it looks at the outbox after it has ceased to wait
            with suppress(BlockingIOError):  # full of wakes already
                self._wakes.send(b"!")
            return
        while self._outbox and not self._closing.is_set():  # until it is sent, by whoever has the lock
            if self._lock.acquire(timeout=_LOCK_S):
                try:
                    self._flush()
                finally:
                    self._lock.release()

    def _flush(self) -> None:
        while self._outbox:
            self._dealer.send_multipart(self._outbox.popleft(), copy=False)

    def close(self, linger_s: float = _LINGER_S) -> None:
        """Close the connection; waits at most `linger_s` for unsent messages."""
        self._closing.set()
        with self._lock:
            self._dealer.close(linger=int(linger_s * 1000))
            self._context.term()
            self._awake.close()
            self._wakes.close()

    def _stay_alive(self) -> None:
        while not self._closing.wait(self._beat_s / 2):
            # If the lock is taken, `receive` holds it and pumps by itself.
            if self._lock.acquire(timeout=self._beat_s):
                try:
                    if not self._closing.is_set():
                        self._pump(wait=False)
                finally:
                    self._lock.release()

    def _handle(self, message: Message) -> None:
        if message.kind is Kind.DUMP:
            self._dealer.send_multipart(_dump().frames())
        elif message.kind is Kind.PEER_LOST:
            lost_peers.tell(message.call)
        else:
            self._inbox.append(message)

    def _pump(self, *, wait: bool) -> None:
        """Receive messages, send due heartbeats, and end the process when the driver was silent for too long."""
        self._waiting = wait  # before the outbox is looked at: what is put there later ends the wait
        self._flush()
        wait_s = max(0.0, self._next_beat - time.monotonic()) if wait else 0.0
        ready = dict(self._poller.poll(int(wait_s * 1000) + 1 if wait_s else 0))
        self._waiting = False
        if ready.pop(self._awake.fileno(), None):
            self._awake.recv(_SMALL_BYTES)
        self._flush()
        now = time.monotonic()
        # A stopped or starved process receives nothing: that time does not count as silence of the driver.
        self._heard += max(0.0, now - self._polled - 4 * self._beat_s)
        self._polled = now
        if ready:
            self._heard = now
            for frames in receive(self._dealer, self._beat_s):
                if frames != BEAT_FRAMES:
                    try:
                        self._handle(parse(frames))
                    except ChannelError as error:
                        self._inbox.append(error)
        if now >= self._next_beat:
            self._dealer.send_multipart(_beat())
            self._next_beat = now + self._beat_s
        if now - self._heard > self._silence_s:
            print(f"no sign of the driver for {self._silence_s:.0f} s: leaving", file=sys.stderr, flush=True)
            os._exit(EXIT_ORPHANED)


def _beat() -> list[Buffer]:
    """Return a heartbeat; while a verb is served it says how far that is."""
    progress = activity.snapshot()
    return BEAT_FRAMES if progress is None else Message(Kind.BEAT, progress).frames()


def _dump() -> Message:
    """Write the stacks of all threads to the log, and the recorded collectives of the group beside it. This runs in the
    channel's thread, for the main one may answer no more."""
    print("── where this rank is: the driver requested all stacks ──", file=sys.stderr, flush=True)
    faulthandler.dump_traceback(sys.stderr, all_threads=True)
    try:
        recorded = flight_recorder.dump()
    except (OSError, RuntimeError) as error:  # the stacks are written, whatever this one meets
        print(f"the flight recorder cannot be read: {error}", file=sys.stderr, flush=True)
        recorded = None
    return Message(Kind.DUMPED, {"file": str(recorded or "")})


def receive(peer: zmq.Socket[bytes], limit_s: float) -> list[list[Buffer]]:
    """Return the messages that have arrived, as many as can be read in `limit_s`: they may come faster than that. Large
    frames are views of the received memory, not copies."""
    messages: list[list[Buffer]] = []
    until = time.monotonic() + limit_s
    while int(peer.getsockopt(zmq.EVENTS)) & zmq.POLLIN and time.monotonic() < until:
        frames = [peer.recv(copy=False)]
        while frames[-1].more:  # `recv_multipart` would ask the socket, in Python
            frames.append(peer.recv(copy=False))
        messages.append([frame.bytes if len(frame) < _SMALL_BYTES else frame.buffer for frame in frames])
    return messages
