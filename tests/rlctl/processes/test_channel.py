"""The driver's door: who is let in, who is not, and that strangers cannot harm a run."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import zmq
from flood import flooded
from probe_groups import wait_until

from rlctl.processes.channel import Event, Hub, Joined, Received, Silent
from rlctl.processes.handshake import Handshake
from specs.errors import ChannelError
from specs.wire.messages import Kind, Message, Verb, parse
from workers.connection import Dial, Link
from workers.proof import make_proof

BOUND_S = 30.0


@pytest.fixture
def hub() -> Iterator[Hub]:
    hub = Hub(heartbeat_timeout_s=20)
    hub.expect("actor", 2)
    yield hub
    hub.close()


def test_both_sides_prove_and_then_talk(hub: Hub) -> None:
    link = _join(hub, rank=1)
    hub.send("actor", 1, Message(Kind.CALL, {"n": 1}, Verb.PING, 5).frames())
    call = link.receive()
    assert (call.verb, call.call, call.body["n"]) == (Verb.PING, 5, 1)
    link.send(Message(Kind.ANSWER, {"n": 2}, Verb.PING, 5))
    event = _next(hub, Received)
    assert isinstance(event, Received)
    assert (event.role, event.rank, parse(event.frames).body["n"]) == ("actor", 1, 2)
    link.close()


def test_a_wrong_secret_is_refused_on_both_sides(hub: Hub) -> None:
    link = Link(Dial(hub.address, "not the secret", "actor", 0, _key(hub)))
    with pytest.raises(ChannelError, match="does not have this run's secret"):
        _while_pumping(hub, lambda: link.connect(10))
    link.close()
    _join(hub).close()  # the place is still free


def test_a_rank_cannot_skip_or_forge_its_proof(hub: Hub) -> None:
    with _stranger(hub) as ask:
        assert ask(Message(Kind.ANSWER, {}, Verb.PING, 1)).kind is Kind.ERROR
        assert ask(Message(Kind.PROOF, {"proof": "00"})).kind is Kind.ERROR
        hello = {"role": "actor", "rank": 0, "pid": 1, "host": "h", "nonce": "n"}
        challenge = ask(Message(Kind.HELLO, hello))
        assert challenge.kind is Kind.CHALLENGE
        forged = make_proof("guess", "rank", role="actor", rank=0, rank_nonce="n", driver_nonce=challenge.body["nonce"])
        assert ask(Message(Kind.PROOF, {"proof": forged})).kind is Kind.ERROR
        challenge = ask(Message(Kind.HELLO, hello))
        echoed = ask(Message(Kind.PROOF, {"proof": challenge.body["proof"]}))  # the driver's own proof sent back
        assert echoed.kind is Kind.ERROR
        assert ask(Message(Kind.HELLO, {**hello, "rank": 2})).kind is Kind.ERROR
        assert ask(Message(Kind.HELLO, {**hello, "role": "critic"})).kind is Kind.ERROR
        assert ask(Message(Kind.HELLO, {**hello, "rank": 1e999})).kind is Kind.ERROR
    assert hub.next(0.2) is None
    assert hub.refused == 7


def test_a_second_rank_of_the_same_place_is_refused(hub: Hub) -> None:
    first = _join(hub)
    second = Link(Dial(hub.address, hub.secret, "actor", 0, _key(hub)))
    with pytest.raises(ChannelError, match="already here"):
        _while_pumping(hub, lambda: second.connect(10))
    second.close()
    first.close()


def test_garbage_does_not_harm(hub: Hub) -> None:
    host, port = hub.address.removeprefix("tcp://").split(":")
    for _ in range(20):
        with socket.create_connection((host, int(port))) as raw:
            raw.sendall(os.urandom(2000))
    with _stranger(hub) as ask:
        for junk in (b"", b"{}", b"[" * 4000, b'{"v":1}', b"\xff" * 10, b"x" * 2**20):
            assert ask([junk]).kind is Kind.ERROR
        assert ask([b"a", b"b", b"c"]).kind is Kind.ERROR
    _join(hub).close()


def test_a_flood_of_greetings_is_forgotten() -> None:
    handshake = Handshake("secret", {"actor": 1}, {})
    hello = Message(Kind.HELLO, {"role": "actor", "rank": 0, "pid": 1, "host": "h", "nonce": "n"}).frames()
    for number in range(5000):
        handshake.hear(str(number).encode(), hello)
    assert len(handshake._pending) <= 256


def test_hundreds_of_ranks_may_come_at_once() -> None:
    """None is taken for a flood, neither its greeting nor its proof."""
    hub, context, count = Hub(heartbeat_timeout_s=20), zmq.Context(), 300
    try:
        hub.expect("rollout", count)
        dealers = [_dealer(hub, context) for _ in range(count)]
        with hub._lock:  # busy meanwhile
            for rank, dealer in enumerate(dealers):
                who = {"role": "rollout", "rank": rank, "pid": 1, "host": "h", "nonce": "n"}
                dealer.send_multipart(Message(Kind.HELLO, who).frames())
            time.sleep(1.0)
        challenges = [_pumped(hub, dealer) for dealer in dealers]
        assert {challenge.kind for challenge in challenges} == {Kind.CHALLENGE}
        for rank, (dealer, challenge) in enumerate(zip(dealers, challenges, strict=True)):
            nonces = {"rank_nonce": "n", "driver_nonce": challenge.body["nonce"]}
            proof = make_proof(hub.secret, "rank", role="rollout", rank=rank, **nonces)
            dealer.send_multipart(Message(Kind.PROOF, {"proof": proof}).frames())
        joined = [_next(hub, Joined) for _ in range(count)]
        assert {event.member.rank for event in joined if isinstance(event, Joined)} == {*range(count)}
    finally:
        context.destroy(linger=0)
        hub.close()


def _dealer(hub: Hub, context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
    dealer = context.socket(zmq.DEALER)
    dealer.curve_publickey, dealer.curve_secretkey = zmq.curve_keypair()
    dealer.curve_serverkey = _key(hub).encode()
    dealer.connect(hub.address)
    return dealer


def _pumped(hub: Hub, dealer: zmq.Socket[bytes]) -> Message:
    """What the hub says to it next."""

    def nothing_yet() -> bool:
        assert hub.next(0) is None
        return not dealer.poll(10)

    assert wait_until(lambda: not nothing_yet()), "the driver said nothing"
    return parse([*dealer.recv_multipart()])


def test_a_flood_of_strangers_costs_no_rank_its_beats() -> None:
    """Two at a time, of every kind, while another rank is awaited. None is heard, for none has this run's key."""
    hub = Hub(heartbeat_timeout_s=2)
    try:
        hub.expect("actor", 2)
        link = _join(hub)
        for kinds in (("hello", "stream"), ("key", "idle")):
            with flooded(hub.address, kinds, 1.5) as strangers:
                waits = _echo_times(hub, link, lambda: all(one.poll() is not None for one in strangers))
                sent = [int(stranger.communicate()[0].split()[1]) for stranger in strangers]
            assert min(sent) > 10, "a flood that was none"
            assert max(waits) < BOUND_S
        assert hub.refused == 0
        link.close()
    finally:
        hub.close()


@pytest.mark.skipif(sys.platform != "linux", reason="the door is shut by a filter of Linux's")
def test_the_door_is_open_only_while_a_rank_is_awaited() -> None:
    hub = Hub(heartbeat_timeout_s=20)
    try:
        host, port = hub.address.removeprefix("tcp://").split(":")

        def is_open(within_s: float = BOUND_S) -> bool:
            with suppress(TimeoutError), socket.create_connection((host, int(port)), within_s):
                return True
            return False

        hub.expect("actor", 1)
        assert is_open()
        link = _join(hub)
        assert not is_open(0.3)
        assert len(_echo_times(hub, link, iter([False, True]).__next__)) == 1, "who is in is heard"
        hub.expect("rollout", 1)
        assert is_open()
        hub.expect("rollout", 0)
        hub.forget("actor", 0)
        link.close()
        assert is_open(), "it is to be started again"
        _join(hub).close()
        assert not is_open(0.3)
    finally:
        hub.close()


def test_connections_with_the_key_but_no_proof_are_heard_last_and_a_few_at_a_time(hub: Hub) -> None:
    """A flood from inside: by a process that was told the key."""
    link = _join(hub)
    hello = Message(Kind.HELLO, {"role": "actor", "rank": 1, "pid": 1, "host": "h", "nonce": "n"}).frames()
    until = time.monotonic() + 1.5
    with _stranger(hub) as ask, ThreadPoolExecutor(1) as pool:
        flood = pool.submit(ask.flood, hello, 1000, until)
        waits = _echo_times(hub, link, flood.done)
        flood.result()
    assert max(waits) < BOUND_S
    link.close()


def test_curve_refuses_plain_connections(hub: Hub) -> None:
    context = zmq.Context()
    plain = context.socket(zmq.DEALER)
    plain.connect(hub.address)
    plain.send_multipart(Message(Kind.HELLO, {}).frames())
    assert not plain.poll(500)
    assert hub.refused == 0
    plain.close(linger=0)
    context.term()


def test_silence_is_reported_once_and_beats_prevent_it() -> None:
    hub = Hub(heartbeat_timeout_s=20)
    try:
        hub.expect("actor", 1)
        link = _join(hub)
        (peer,) = hub._peers.values()
        heard = peer.heard
        assert wait_until(lambda: hub.next(0.1) is None and peer.heard > heard + 2)  # the rank's second thread beats
        link._closing.set()  # and now no more
        hub.heartbeat_timeout_s = 1.0
        event = _next(hub, Silent)
        assert isinstance(event, Silent)
        assert event.seconds >= 1.0
        assert hub.next(1.5) is None
        link.close()
    finally:
        hub.close()


def test_time_in_which_the_driver_does_not_listen_is_nobodys_silence() -> None:
    """Of a driver that was stopped, with all its ranks: their beats come later than it looks."""
    hub = Hub(heartbeat_timeout_s=4)
    try:
        hub.expect("actor", 1)
        link = _join(hub)
        link._closing.set()
        hub._closing.set()
        hub._thread.join()  # nobody looks but this one
        hub._closing.clear()
        (peer,) = hub._peers.values()
        hub._looked, peer.heard = hub._looked - 60, hub._looked - 60
        assert hub.next(0) is None
        link.close()
    finally:
        hub.close()


def test_sending_to_nobody_is_not_an_error(hub: Hub) -> None:
    hub.send("actor", 0, Message(Kind.BEAT).frames())
    link = _join(hub)
    link.close()
    for _ in range(20):
        hub.send("actor", 0, Message(Kind.CALL, {}, Verb.PING, 1).frames())
        time.sleep(0.01)


# ── helpers ───────────────────────────────────────────────────────────────────────────────────────


def _key(hub: Hub) -> str:
    return hub.environment()["RLCTL_CURVE_KEY"]


def _echo_times(hub: Hub, link: Link, done: Callable[[], bool]) -> list[float]:
    """Seconds from a rank's message to the driver's hearing of it, over and over."""
    waits: list[float] = []
    while not done():
        sent = time.monotonic()
        link.send(Message(Kind.ANSWER, {}, Verb.PING, 1))
        assert isinstance(_next(hub, Received), Received)
        waits.append(time.monotonic() - sent)
        time.sleep(0.02)
    return waits


def _join(hub: Hub, rank: int = 0) -> Link:
    link = Link(Dial(hub.address, hub.secret, "actor", rank, _key(hub)))
    _while_pumping(hub, lambda: link.connect(20))
    event = _next(hub, Joined)
    assert isinstance(event, Joined)
    assert (event.member.role, event.member.rank, event.member.pid) == ("actor", rank, os.getpid())
    return link


def _while_pumping(hub: Hub, work: object) -> None:
    """The hub's second thread answers handshakes while the first does something else."""
    assert callable(work)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result(timeout=120)


def _next(hub: Hub, kind: type[Event]) -> Event:
    seen: list[Event] = []

    def found() -> bool:
        event = hub.next(0.1)
        if event is not None:
            seen.append(event)
        return isinstance(event, kind)

    assert wait_until(found), seen
    return seen[-1]


class _stranger:
    """A raw connection with the run's key that has proven nothing: `ask` sends anything and returns the driver's
    reply."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._context = zmq.Context()
        self._dealer = self._context.socket(zmq.DEALER)
        self._dealer.curve_publickey, self._dealer.curve_secretkey = zmq.curve_keypair()
        self._dealer.curve_serverkey = _key(hub).encode()
        self._dealer.connect(hub.address)

    def __enter__(self) -> _stranger:
        return self

    def __call__(self, what: Message | list[bytes]) -> Message:
        self._dealer.send_multipart(what.frames() if isinstance(what, Message) else what)
        assert wait_until(lambda: self._hub.next(0) is None and self._dealer.poll(10))
        return parse(self._dealer.recv_multipart())

    def flood(self, what: list[bytes], least: int, until: float) -> None:
        """Send as fast as it goes, and never read; at least so often."""
        sent = 0
        while sent < least or time.monotonic() < until:
            with suppress(zmq.Again):
                self._dealer.send_multipart(what, zmq.NOBLOCK)
                sent += 1

    def __exit__(self, *_: object) -> None:
        self._dealer.close(linger=0)
        self._context.term()
