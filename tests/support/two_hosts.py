"""Two hosts on one machine: network namespaces joined by a cable, with nothing but their own loopback beside it."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

REMOTE_SHELL = '["ip", "netns", "exec", "{host}", "sh"]'


@dataclass(frozen=True)
class TwoHosts:
    """Names of the namespaces, which stand for host names, and the first one's address on the cable."""

    here: str
    there: str
    address: str

    def command(self, *words: str) -> list[str]:
        """`words` as a command that runs on the first host."""
        return ["ip", "netns", "exec", self.here, *words]


@contextmanager
def two_hosts() -> Iterator[TwoHosts | None]:
    """Two joined hosts; None where this process may not make network namespaces."""
    mark = f"rl{os.getpid()}"
    here, there = f"{mark}a", f"{mark}b"
    try:
        if not _build(here, there):
            yield None
            return
        yield TwoHosts(here, there, "10.77.0.1")
    finally:
        for name in (here, there):
            _run("ip", "netns", "delete", name)


def _build(here: str, there: str) -> bool:
    """Both namespaces and the cable; False as soon as one command is refused."""
    if shutil.which("ip") is None:
        return False
    steps = [("netns", "add", here), ("netns", "add", there)]
    steps += [("link", "add", "cable", "netns", here, "type", "veth", "peer", "name", "cable", "netns", there)]
    for host, address in ((here, "10.77.0.1/24"), (there, "10.77.0.2/24")):
        steps += [("-n", host, "addr", "add", address, "dev", "cable")]
        steps += [("-n", host, "link", "set", device, "up") for device in ("cable", "lo")]
    return all(_run("ip", *step) for step in steps)


def _run(*command: str) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0 if shutil.which("ip") else False
