"""Hosts that a run has begun without: each is looked for until it is there, checked as the others were before the
start, and its ranks are started where nothing keeps it from its part."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from rlctl.processes.launch import Place
from rlctl.processes.placement import Unreached
from specs.errors import SpecError

LOOK_S = 10.0  # between two looks for a host


@dataclass
class _Host:
    unreached: Unreached
    look_at: float
    places: set[Place] = field(default_factory=set)  # ranks that have not joined
    reported: dict[Place, str] = field(default_factory=dict)  # the last reason of each
    check: Future[str] | None = None


class JoiningHosts:
    """Looks for hosts. `start` starts a rank; `report` says why one cannot join, once for each reason."""

    def __init__(
        self, unreached: Mapping[str, Unreached], start: Callable[[Place], None], report: Callable[[Place, str], None]
    ) -> None:
        self._hosts = {name: _Host(host, time.monotonic() + LOOK_S) for name, host in unreached.items()}
        self._start, self._report = start, report
        self._pool = ThreadPoolExecutor(max(1, len(unreached)), "joining-host")

    def await_rank(self, host: str, place: Place) -> None:
        """Look for this host from now on."""
        self._hosts[host].places.add(place)

    def joined(self, place: Place) -> None:
        """Look no longer for a rank that has joined."""
        for host in self._hosts.values():
            host.places.discard(place)

    def ended(self, place: Place, why: str) -> bool:
        """Return whether a rank that ended is one that is looked for; its host is then checked again."""
        found = [host for host in self._hosts.values() if place in host.places]
        for host in found:
            host.look_at = time.monotonic() + LOOK_S
            self._report_once(host, place, why)
        return bool(found)

    def look(self) -> None:
        """Go on with every host, without waiting for any."""
        for host in self._hosts.values():
            if host.check is not None and host.check.done():
                check, host.check = host.check, None
                self._settle(host, check)
            elif host.check is None and host.places and time.monotonic() > host.look_at:
                host.check = self._pool.submit(host.unreached.check)

    def close(self) -> None:
        """Look for no host any more."""
        for host in self._hosts.values():
            host.unreached.stop()
        self._pool.shutdown(cancel_futures=True)

    def _settle(self, host: _Host, check: Future[str]) -> None:
        host.look_at = time.monotonic() + LOOK_S
        try:
            unreached, refused = check.result(), ""
        except SpecError as error:
            first = error.problems[0]
            unreached, refused = "", f"{first.message} ({first.hint})" if first.hint else first.message
        except OSError as error:  # of this host
            unreached, refused = "", f"it cannot be checked: {error}"
        for place in sorted(host.places):
            if refused:
                self._report_once(host, place, f"is there, but cannot take part: {refused}")
            elif not unreached:
                host.look_at = math.inf  # until a rank of it ends
                self._start(place)

    def _report_once(self, host: _Host, place: Place, why: str) -> None:
        reason = re.sub(r"\d", "", why)  # seconds and ports differ each time
        if host.reported.get(place) != reason:
            host.reported[place] = reason
            self._report(place, why)
