"""Keep what this process waits for in a verb in which ranks of several roles meet, and the driver's word that one of
them is gone. A connection to a host whose network is down does not end by itself, and so many seconds may pass."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from backends import activity
from specs.errors import PeerGone

LOOK_S = 0.2  # how often a wait looks whether it is in vain
T = TypeVar("T")


class _Told:
    call = 0  # the verb that waits for a rank that is gone


def tell(call: int) -> None:
    """The driver says that this verb, which may not have begun, waits for a rank that is gone."""
    _Told.call = call


def check(peer: str) -> None:
    """Raises PeerGone when the verb that is served waits for a rank that is gone."""
    if _Told.call and _Told.call == activity.call():
        raise PeerGone(peer, "is gone, the driver says")


class _Work(Generic[T]):
    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self.result: list[T] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.result.append(self._work())
        except BaseException as error:  # raised where somebody waits for it
            self.error = error


def unless_lost(work: Callable[[], T], peer: str) -> T:
    """Do what waits for other ranks, in a thread that is left to itself when one of them is lost. Raises PeerGone, and
    what `work` raises."""
    done: _Work[T] = _Work(work)
    thread = threading.Thread(target=done.run, name="meeting", daemon=True)
    thread.start()
    wait_for_thread(thread, peer)
    if done.error is not None:
        raise done.error
    return done.result[0]


def wait_for_thread(thread: threading.Thread, peer: str) -> None:
    """Until a thread ends that waits for other ranks. Raises PeerGone."""
    while thread.is_alive():
        thread.join(LOOK_S)
        if thread.is_alive():
            check(peer)
