"""Hosts that a run has begun without: each is looked for until it is there, asked what the others were asked before the
start, and its ranks are started where nothing keeps it from its part."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping

from rlctl.processes.placement import Unreached
from rlctl.processes.rank_states import Place
from specs.errors import SpecError

LOOK_S = 10.0  # between two looks for a host
_STOP_S = 5.0


class LateHosts:
    """Looks for hosts. `start` starts a rank; `tell` is told of a rank why it cannot come, once for each reason."""

    def __init__(
        self, unreached: Mapping[str, Unreached], start: Callable[[Place], None], tell: Callable[[Place, str], None]
    ) -> None:
        self._hosts = {name: _LateHost(one) for name, one in unreached.items()}
        self._start, self._tell = start, tell

    def await_rank(self, host: str, place: Place) -> None:
        """From now on look for this host."""
        self._hosts[host].places.add(place)

    def joined(self, place: Place) -> None:
        """A rank has come, and is no longer looked for."""
        for host in self._hosts.values():
            host.places.discard(place)

    def ended(self, place: Place, why: str) -> bool:
        """Whether a rank that ended is one that is looked for; then its host is asked again."""
        found = [host for host in self._hosts.values() if place in host.places]
        for host in found:
            host.wait()
            self._say(host, place, why)
        return bool(found)

    def look(self) -> None:
        """Go on with every host, without waiting for any."""
        for host in self._hosts.values():
            if not host.places:
                continue
            if (answer := host.look()) is None:
                continue
            for place in sorted(host.places):
                if answer.able:
                    self._start(place)
                elif answer.refused:
                    self._say(host, place, f"is there, but cannot take part: {answer.refused}")

    def close(self) -> None:
        """Look for nobody any more."""
        for host in self._hosts.values():
            host.close()

    def _say(self, host: _LateHost, place: Place, why: str) -> None:
        reason = re.sub(r"\d", "", why)  # seconds and ports differ each time
        if host.said.get(place) != reason:
            host.said[place] = reason
            self._tell(place, why)


class _Answer:
    """What came of asking a host. `refused`: what keeps it from its part."""

    def __init__(self) -> None:
        self.able, self.refused = False, ""


class _LateHost:
    """One host: it is asked, in a thread, or waits to be asked, or its ranks have been started."""

    def __init__(self, unreached: Unreached) -> None:
        self.unreached = unreached
        self.places: set[Place] = set()  # that have not come
        self.said: dict[Place, str] = {}  # the last reason that was told
        self._look_at: float | None = time.monotonic() + LOOK_S  # None: it is asked, or has its ranks
        self._answer = _Answer()
        self._asking: threading.Thread | None = None

    def wait(self) -> None:
        """Ask it again after a while."""
        if self._asking is None:
            self._look_at = time.monotonic() + LOOK_S

    def look(self) -> _Answer | None:
        """What it has answered, if that is news. Has it asked when it is time."""
        if self._asking is not None:
            if self._asking.is_alive():
                return None
            self._asking = None
            if not self._answer.able:
                self.wait()
            return self._answer
        if self._look_at is not None and time.monotonic() > self._look_at:
            self._look_at, self._answer = None, _Answer()
            self._asking = threading.Thread(target=self._ask, args=(self._answer,), name="late-host", daemon=True)
            self._asking.start()
        return None

    def close(self) -> None:
        self.unreached.stop()
        if self._asking is not None:
            self._asking.join(_STOP_S)

    def _ask(self, answer: _Answer) -> None:
        try:
            answer.able = not self.unreached.ask()
        except SpecError as error:
            first = error.problems[0]
            answer.refused = f"{first.message} ({first.hint})" if first.hint else first.message
        except OSError as error:  # of this host
            answer.refused = f"it cannot be asked: {error}"
