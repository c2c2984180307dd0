"""Finds the network interface that leads to another host."""

from __future__ import annotations

import socket
import struct
import sys

_SIOCGIFADDR = 0x8915


def address_towards(host: str) -> str:
    """This host's IPv4 address on the way to `host`; nothing is sent. Raises OSError without a route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return str(probe.getsockname()[0])


def interface_towards(host: str) -> str:
    """Name of the interface on the way to `host`; empty if unknown (not Linux, no route)."""
    try:
        wanted = address_towards(host)
        return next((name for _, name in socket.if_nameindex() if address_of_interface(name) == wanted), "")
    except OSError:
        return ""


def address_of_interface(interface: str) -> str:
    """Its IPv4 address; empty if it has none, or there is no such interface, or this is not Linux."""
    if sys.platform != "linux":
        return ""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", interface.encode()))
        except OSError:
            return ""
    return socket.inet_ntoa(answer[20:24])
