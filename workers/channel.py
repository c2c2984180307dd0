"""A rank's end of the channel: a thread that owns the socket, so that beats go on while the rank computes."""

from __future__ import annotations

import os
import queue
import socket
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass

import zmq

from specs.errors import ChannelError
from specs.messages import Kind, Message, parse
from workers.proof import Side, make_nonce, make_proof, same_proof
from workers.watchdog import EXIT_ORPHANED

BEAT_FRAMES = Message(Kind.BEAT).frames()
JOIN_TIMEOUT_S = 60.0
_LINGER_MS = 5000


@dataclass(frozen=True)
class Dial:
    """Where the driver listens, and what proves that it and this rank belong to the same run."""

    address: str
    secret: str
    role: str
    rank: int
    server_key: str = ""  # CURVE public key of the driver; empty: no encryption (loopback)

    @classmethod
    def from_env(cls, role: str, rank: int) -> Dial:
        """Read RLCTL_ADDRESS, RLCTL_SECRET and RLCTL_CURVE_KEY, and take the secret out of the environment, so that
        processes started from here do not inherit it."""
        try:
            address, secret = os.environ["RLCTL_ADDRESS"], os.environ.pop("RLCTL_SECRET")
        except KeyError as error:
            raise ChannelError(f"{error.args[0]} is not set", hint="a rank is started by `rlctl train`") from None
        return cls(address, secret, role, rank, os.environ.get("RLCTL_CURVE_KEY", ""))


class Link:
    """Connection to the driver. `receive` and `send` are for the serving thread; the socket's thread does the rest."""

    def __init__(self, dial: Dial) -> None:
        self._dial = dial
        self._inbox: queue.SimpleQueue[Message | ChannelError] = queue.SimpleQueue()
        self._outbox: deque[list[bytes]] = deque()
        self._wake_out, self._wake_in = os.pipe()
        os.set_blocking(self._wake_out, False)
        os.set_blocking(self._wake_in, False)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="channel", daemon=True)

    def connect(self, timeout_s: float = JOIN_TIMEOUT_S) -> None:
        """Dial and prove, both ways. Raises ChannelError when the peer does not hold the secret or does not answer."""
        self._thread.start()
        try:
            first = self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            raise ChannelError(f"the driver at {self._dial.address} did not answer in {timeout_s:.0f} s") from None
        if isinstance(first, ChannelError):
            raise first
        assert first.kind is Kind.WELCOME

    def receive(self) -> Message:
        """The next message. Waits as long as the driver is alive: its silence ends the process."""
        message = self._inbox.get()
        if isinstance(message, ChannelError):
            raise message
        return message

    def send(self, message: Message) -> None:
        """Queue a message. Its bytes are made here, so that what cannot be sent raises in the caller."""
        self._outbox.append(message.frames())
        wake(self._wake_in)

    def close(self) -> None:
        """Send what is queued and hang up."""
        self._closing.set()
        wake(self._wake_in)
        self._thread.join(timeout=_LINGER_MS / 1000 + 1)

    # ── the socket's thread ───────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        context = zmq.Context()
        dealer = context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.SNDHWM, 0)
        dealer.setsockopt(zmq.RCVHWM, 0)
        dealer.setsockopt(zmq.LINGER, _LINGER_MS)
        if self._dial.server_key:
            dealer.curve_publickey, dealer.curve_secretkey = zmq.curve_keypair()
            dealer.curve_serverkey = self._dial.server_key.encode()
        dealer.connect(self._dial.address)
        try:
            welcome = self._prove(dealer)
            self._inbox.put(welcome)
            self._pump(dealer, float(welcome.body["beat_s"]), float(welcome.body["silence_s"]))
        except ChannelError as error:
            self._inbox.put(error)
        dealer.close()
        context.term()

    def _prove(self, dealer: zmq.Socket[bytes]) -> Message:
        dial, nonce = self._dial, make_nonce()
        who = {"role": dial.role, "rank": dial.rank, "pid": os.getpid(), "host": socket.gethostname()}
        dealer.send_multipart(Message(Kind.HELLO, {**who, "nonce": nonce}).frames())
        challenge = self._expect(dealer, Kind.CHALLENGE)
        driver_nonce = str(challenge.body.get("nonce", ""))

        def proof(side: Side) -> str:
            who = {"role": dial.role, "rank_nonce": nonce, "driver_nonce": driver_nonce}
            return make_proof(dial.secret, side, rank=dial.rank, **who)

        if not same_proof(challenge.body.get("proof"), proof("driver")):
            raise ChannelError(f"whoever listens at {dial.address} does not hold this run's secret")
        dealer.send_multipart(Message(Kind.PROOF, {"proof": proof("rank")}).frames())
        return self._expect(dealer, Kind.WELCOME)

    def _expect(self, dealer: zmq.Socket[bytes], kind: Kind) -> Message:
        if not dealer.poll(int(JOIN_TIMEOUT_S * 1000)):
            raise ChannelError(f"the driver at {self._dial.address} did not send {kind} in {JOIN_TIMEOUT_S:.0f} s")
        message = parse(dealer.recv_multipart())
        if message.kind is Kind.ERROR:
            raise ChannelError(f"the driver refused this rank: {message.body.get('message', '')}")
        if message.kind is not kind:
            raise ChannelError(f"expected {kind}, got {message.kind}")
        return message

    def _pump(self, dealer: zmq.Socket[bytes], beat_s: float, silence_s: float) -> None:
        poller = zmq.Poller()
        poller.register(dealer, zmq.POLLIN)
        poller.register(self._wake_out, zmq.POLLIN)
        heard = looked = time.monotonic()
        next_beat = looked
        while True:
            ready = dict(poller.poll(int(max(0.0, next_beat - time.monotonic()) * 1000) + 1))
            now = time.monotonic()
            # A thread that was stopped or starved could not have heard anything: that time is not the driver's silence.
            heard, looked = heard + max(0.0, now - looked - 2 * beat_s), now
            if dealer in ready:
                heard = now
                for frames in receive_all(dealer):
                    if frames != BEAT_FRAMES:
                        self._inbox.put(parse(frames))
            if self._wake_out in ready:
                drain(self._wake_out)
            while self._outbox:
                dealer.send_multipart(self._outbox.popleft(), copy=False)
            if self._closing.is_set():
                return
            if now >= next_beat:
                dealer.send_multipart(BEAT_FRAMES)
                next_beat = now + beat_s
            if now - heard > silence_s:
                print(f"no sign of the driver for {silence_s:.0f} s: leaving", file=sys.stderr, flush=True)
                os._exit(EXIT_ORPHANED)


def receive_all(peer: zmq.Socket[bytes]) -> list[list[bytes]]:
    """Every message that is there now."""
    messages: list[list[bytes]] = []
    while True:
        try:
            messages.append(peer.recv_multipart(zmq.NOBLOCK))
        except zmq.Again:
            return messages


def drain(pipe: int) -> None:
    """Empty the pipe that woke a poll."""
    try:
        os.read(pipe, 4096)
    except BlockingIOError:
        return


def wake(pipe: int) -> None:
    """Wake the poll that reads the pipe. Any thread may."""
    try:
        os.write(pipe, b"\0")
    except BlockingIOError:
        return  # full: the thread is awake
