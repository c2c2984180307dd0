"""Who listens where: TCP sockets of this process and of all that it started (Linux)."""

from __future__ import annotations

import ipaddress
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

_LISTEN = "0A"  # in /proc/net/tcp
_PERIOD_S = 0.25


def listeners() -> dict[tuple[str, int], str]:
    """(address, port) → process, of each listening socket of this process and its descendants."""
    found = {}
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        with suppress(psutil.Error):
            for each in process.net_connections("tcp"):
                if each.status == psutil.CONN_LISTEN:
                    found[each.laddr.ip, each.laddr.port] = f"{process.pid} {process.name()}"
    return found


def is_loopback(address: str) -> bool:
    ip = ipaddress.ip_address(address)
    return ((ip.version == 6 and ip.ipv4_mapped) or ip).is_loopback


@contextmanager
def none_beyond_loopback() -> Iterator[dict[tuple[str, int], str]]:
    """Inside, no process that this one starts may listen where another host could reach it. Gives those that do, as
    they are seen."""
    known, done = _reachable(), threading.Event()
    seen: dict[tuple[str, int], str] = {}

    def watch() -> None:
        while not done.wait(_PERIOD_S):
            if new := _reachable() - known:  # which process's it is takes long to find: once for each
                seen.update((where, who) for where, who in listeners().items() if not is_loopback(where[0]))
                known.update(new)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        done.set()
        thread.join()
    assert not seen, f"these listen beyond loopback: {seen}"


def _reachable() -> set[str]:
    """Addresses in /proc/net of listening sockets that are not on loopback."""
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    return {line[1] for line in lines if line[3] == _LISTEN and not line[1].startswith(("0100007F:", _V6_LOOPBACK))}


_V6_LOOPBACK = "00000000000000000000000001000000:"
