"""Strangers who connect to whatever listens, say all sorts of things, and overwrite what they can."""

from __future__ import annotations

import base64
import os
import socket
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from flood import KINDS, flood
from listeners import is_loopback, listeners
from torch import distributed as dist

_ANSWER_S = 0.2


def disturb_all(before: set[tuple[str, int]], folder: Path, *, at_least: int) -> int:
    """Disturb whatever listens now and did not `before`; how many let a stranger overwrite keys."""
    found = {where: who for where, who in listeners().items() if where not in before}
    assert len(found) >= at_least, found
    assert all(is_loopback(address) for address, _ in found), found
    bait = folder / "bait"
    took_keys = [disturb(address, port, bait) for address, port in found]
    assert not bait.exists(), "a stranger's code ran"
    return sum(took_keys)


def code(file: Path) -> bytes:
    """A pickle that makes a folder where it is read, as torchrun's c10d rendezvous would keep it in a store."""
    return base64.b64encode(f"cos\nmkdir\n(V{file}\ntR.".encode())


def disturb(address: str, port: int, bait: Path) -> bool:
    """Say all sorts of things to whatever listens there. Whether it is a store, and let its keys be overwritten."""
    is_store = _is_store(address, port)
    for said in (b"", os.urandom(2000), b"\xff" * 64, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", code(bait)):
        with suppress(OSError), socket.create_connection((address, port), _ANSWER_S) as stranger:
            stranger.sendall(said)
            stranger.recv(1000)
    for kind in KINDS:
        flood(kind, address, port, 0.1)
    if is_store:
        store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=60), wait_for_workers=False)
        for key in store.list_keys():
            store.set(key, code(bait))
    return is_store


def _is_store(address: str, port: int) -> bool:
    """Whether a store of torch's answers there. Its own client waits for ever where something else does."""
    validate, ping = b"\0" + (0x3C85F7CE).to_bytes(4, "little"), b"\x0d" + b"ping"
    with suppress(OSError), socket.create_connection((address, port), _ANSWER_S) as stranger:
        stranger.sendall(validate + ping)
        return stranger.recv(4) == b"ping"
    return False
