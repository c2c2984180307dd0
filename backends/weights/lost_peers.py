"""Keep what this process waits for in a verb in which ranks of several roles meet, and the driver's word that one of
them is gone. A connection to a host whose network is down does not end by itself, and so many seconds may pass."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from backends import activity
from specs.errors import PeerGone

LOOK_S = 0.2  # how often a wait looks whether it is in vain
T = TypeVar("T")


class _Lost:
    call = 0  # the verb that waits for a rank that is gone


def tell(call: int) -> None:
    """The driver says that this verb, which may not have begun, waits for a rank that is gone."""
    _Lost.call = call


def check(peer: str) -> None:
    """Raises PeerGone when the verb that is served waits for a rank that is gone."""
    if _Lost.call and _Lost.call == activity.call():
        raise PeerGone(peer, "is gone, the driver says")


def unless_lost(work: Callable[[], T], peer: str) -> T:
    """Do what waits for other ranks, in a thread that is left to itself when one of them is lost. Raises PeerGone, and
    what `work` raises."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # raised where somebody waits for it
            done.set_exception(error)

    thread = threading.Thread(target=run, name="meeting", daemon=True)
    thread.start()
    wait_for_thread(thread, peer)
    return done.result()


def wait_for_thread(thread: threading.Thread, peer: str) -> None:
    """Until a thread ends that waits for other ranks. Raises PeerGone."""
    while thread.is_alive():
        thread.join(LOOK_S)
        if thread.is_alive():
            check(peer)
