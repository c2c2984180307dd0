"""Find the network interface that leads to another host."""

from __future__ import annotations

import socket


def address_towards(host: str) -> str:
    """Return this host's IPv4 address on the way to `host`; nothing is sent. Raise OSError without a route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return str(probe.getsockname()[0])


def interface_towards(host: str) -> str:
    """Return the name of the interface on the way to `host`; empty without a route."""
    import psutil  # here: ranks on one host need no interface

    try:
        wanted = address_towards(host)
    except OSError:
        return ""
    own = psutil.net_if_addrs().items()
    return next((name for name, addresses in own if wanted in [address.address for address in addresses]), "")
