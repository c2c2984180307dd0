"""The TCP port at which ranks find the driver. It is open while a rank is awaited, and shut otherwise."""

from __future__ import annotations

import ctypes
import socket
import struct
import sys
from contextlib import suppress

_BACKLOG = 128
# Linux: a packet filter (classic BPF) of one instruction, "return 0", which drops whatever comes in.
_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27
_DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)


class Door:
    """Listens at `host` and nowhere else, on a port that is free.

    `shut` leaves connections that are through alone; ZeroMQ itself would end them when it stops to listen. Each that it
    accepts costs it more than the stranger, even to refuse. When the door is shut, the kernel drops what a stranger
    sends, and he waits. Elsewhere than on Linux the door stays open.
    """

    def __init__(self, host: str) -> None:
        self._listener = socket.create_server((host, 0), backlog=_BACKLOG)
        self._listener.setblocking(False)
        self.port = int(self._listener.getsockname()[1])
        self._filter = ctypes.create_string_buffer(_DROP_ALL, len(_DROP_ALL))
        self._open = True

    def hand_over(self) -> int:
        """A descriptor for ZeroMQ to accept from, and to close."""
        return self._listener.dup().detach()

    def open(self) -> None:
        if not self._open:
            self._listener.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)
            self._open = True

    def shut(self) -> None:
        if self._open and sys.platform == "linux":
            program = struct.pack("HP", 1, ctypes.addressof(self._filter))
            with suppress(OSError):  # a sandbox may not know filters
                self._listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
                self._open = False

    def close(self) -> None:
        self._listener.close()
