"""A torch store that listens at one address. Left to itself (`env://`, `tcp://`, torchrun) torch listens at all."""

from __future__ import annotations

import socket
from datetime import timedelta

from torch import distributed as dist


def bound_store(address: str, port: int, size: int, timeout: timedelta) -> tuple[dist.TCPStore, int]:
    """A store for `size` clients, served by this process at `address` alone, and its port (`port` 0: one that is free).
    Raises OSError when the address is not this host's, or the port is taken."""
    family, _, _, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    with socket.create_server(where[:2], family=family) as door:
        taken = int(door.getsockname()[1])
        store = dist.TCPStore(
            address,
            taken,
            size,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=door.fileno(),
        )
        door.detach()  # the store closes it
    return store, taken


def joined_store(address: str, port: int, size: int, timeout: timedelta) -> dist.TCPStore:
    """The same store, seen by another process."""
    return dist.TCPStore(address, port, size, is_master=False, timeout=timeout, wait_for_workers=False)
