"""The driver's end of the channel: who may join, who may not, and that strangers cannot harm a run."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import zmq
from flood import flooded
from probe_groups import wait_until

from rlctl.processes.channel import Event, Hub, Member, Received, Silent
from specs.errors import ChannelError
from specs.wire.messages import Kind, Message, Verb, parse
from workers.connection import Dial, Link

BOUND_S = 30.0
LINKS: list[Link] = []


@contextmanager
def open_hub(heartbeat_timeout_s: float, count: int, role: str = "actor") -> Iterator[Hub]:
    """A hub that expects so many ranks of a role. It is closed at the end, and the links to it before."""
    hub = Hub(heartbeat_timeout_s=heartbeat_timeout_s)
    hub.expect(role, count)
    try:
        yield hub
    finally:
        for link in LINKS:  # also of a test that was left early: a link that hears no driver ends its process
            link.close(linger_s=0)
        LINKS.clear()
        hub.close()


@pytest.fixture
def hub() -> Iterator[Hub]:
    with open_hub(20, 2) as hub:
        yield hub


@pytest.mark.parametrize("wrong", ["driver's public key", "ranks' secret key"])
def test_a_wrong_key_cannot_connect(hub: Hub, wrong: str) -> None:
    env, (public, secret) = hub.environment(), zmq.curve_keypair()
    server_key = public.decode() if wrong == "driver's public key" else env["RLCTL_CURVE_KEY"]
    rank_key = secret.decode() if wrong == "ranks' secret key" else env["RLCTL_SECRET"]
    link = Link(Dial(hub.address, rank_key, "actor", 0, server_key))
    with pytest.raises(ChannelError, match="did not send"):
        link.connect(timeout_s=0.5)
    link.close(linger_s=0)
    assert hub.next(0.1) is None
    _join(hub).close()  # the place is still free


def test_a_greeting_that_is_wrong_is_refused(hub: Hub) -> None:
    with _connection(hub) as ask:
        assert ask(Message(Kind.ANSWER, {}, Verb.PING, 1)).kind is Kind.ERROR
        hello = {"role": "actor", "rank": 0, "start": 0, "pid": 1, "host": "h"}
        for change in ({"rank": 2}, {"role": "critic"}, {"rank": 1e999}, {"pid": None}, {"start": 1}):
            assert ask(Message(Kind.HELLO, {**hello, **change})).kind is Kind.ERROR
        for junk in (b"", b"{}", b"[" * 4000, b'{"v":1}', b"\xff" * 10, b"x" * 2**20):
            assert ask([junk]).kind is Kind.ERROR
        assert ask([b"a", b"b", b"c"]).kind is Kind.ERROR
        assert hub.next(0.2) is None
        link = _join(hub)
        assert "already here" in ask(Message(Kind.HELLO, hello)).body["message"]
        assert hub.forget("actor", 0) == 1
        late = ask(Message(Kind.HELLO, hello))  # the old process's, which came when it was gone
        assert "was started again since" in late.body["message"]
        link.close()


def test_hundreds_of_ranks_may_come_at_once() -> None:
    context, count = zmq.Context(), 300
    with open_hub(20, count, "rollout") as hub:
        dealers = [_dealer(hub, context) for _ in range(count)]
        with hub._lock:  # busy meanwhile
            for rank, dealer in enumerate(dealers):
                who = {"role": "rollout", "rank": rank, "start": 0, "pid": 1, "host": "h"}
                dealer.send_multipart(Message(Kind.HELLO, who).frames())
            time.sleep(1.0)
        assert {_next(hub, Member).rank for _ in range(count)} == {*range(count)}
    context.destroy(linger=0)


def test_a_flood_of_strangers_costs_no_rank_its_beats() -> None:
    """Two at a time, of every kind, while another rank is awaited. None is heard, for none has this run's key."""
    with open_hub(2, 2) as hub:
        link = _join(hub)
        for kinds in (("hello", "stream"), ("key", "idle")):
            with flooded(hub.address, kinds, 1.5) as strangers:
                waits = _echo_times(hub, link, lambda: all(one.poll() is not None for one in strangers))
                sent = [int(stranger.communicate()[0].split()[1]) for stranger in strangers]
            assert min(sent) > 10, "a flood that was none"
            assert max(waits) < BOUND_S
        assert hub.next(0) is None


def test_silence_is_reported_once_and_beats_prevent_it() -> None:
    with open_hub(4, 1) as hub:
        link = _join(hub)
        (peer,) = hub._peers.values()
        heard = peer.heard
        assert wait_until(lambda: hub.next(0.1) is None and peer.heard > heard + 0.3)  # the rank's second thread beats
        link._closing.set()  # and now no more
        hub.heartbeat_timeout_s = 1.0
        event = _next(hub, Silent)
        assert isinstance(event, Silent)
        assert event.seconds >= 1.0
        assert hub.next(0.5) is None


def test_driver_pauses_do_not_count_against_heartbeats() -> None:
    """Of a driver that was stopped, with all its ranks: their beats come later than it looks."""
    with open_hub(4, 1) as hub:
        link = _join(hub)
        link._closing.set()
        hub._closing.set()
        hub._thread.join()  # only this thread looks
        hub._closing.clear()
        (peer,) = hub._peers.values()
        hub._polled, peer.heard = hub._polled - 60, hub._polled - 60
        assert hub.next(0) is None


# ── helpers ───────────────────────────────────────────────────────────────────────────────────────


def _dial(hub: Hub, rank: int) -> Dial:
    env = hub.environment()
    return Dial(hub.address, env["RLCTL_SECRET"], "actor", rank, env["RLCTL_CURVE_KEY"])


def _dealer(hub: Hub, context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
    dial, dealer = _dial(hub, 0), context.socket(zmq.DEALER)
    secret = dial.secret.encode()
    dealer.curve_publickey, dealer.curve_secretkey = zmq.curve_public(secret), secret
    dealer.curve_serverkey = dial.server_key.encode()
    dealer.connect(hub.address)
    return dealer


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
    LINKS.append(link := Link(_dial(hub, rank)))
    link.connect(20)  # the hub's second thread answers
    member = _next(hub, Member)
    assert isinstance(member, Member)
    assert (member.role, member.rank, member.pid) == ("actor", rank, os.getpid())
    return link


def _next(hub: Hub, kind: type[Event]) -> Event:
    seen: list[Event] = []

    def found() -> bool:
        event = hub.next(0.1)
        if event is not None:
            seen.append(event)
        return isinstance(event, kind)

    assert wait_until(found), seen
    return seen[-1]


@contextmanager
def _connection(hub: Hub) -> Iterator[Callable[[Message | list[bytes]], Message]]:
    """A raw connection with the run's keys: gives what sends anything and returns the driver's reply."""
    context = zmq.Context()
    dealer = _dealer(hub, context)

    def ask(what: Message | list[bytes]) -> Message:
        dealer.send_multipart(what.frames() if isinstance(what, Message) else what)
        assert wait_until(lambda: hub.next(0) is None and dealer.poll(10))
        return parse(dealer.recv_multipart())

    yield ask
    context.destroy(linger=0)
