"""A stranger who floods a ZeroMQ socket: `python flood.py KIND HOST:PORT SECONDS`; prints what was sent.

hello   connects, greets as ZeroMQ does, says the run's hello, and hangs up: again and again
stream  connects once and says hello as fast as it can
key     connects and begins ZeroMQ's CURVE handshake with a box that nobody can open: again and again
idle    connects and says nothing; keeps the connection
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

WHO = {"role": "actor", "rank": 0, "start": 0, "pid": 1, "host": "h", "nonce": "n" * 64}
HELLO = json.dumps({"v": 1, "kind": "hello", "verb": None, "call": 0, "body": WHO, "busy": None}).encode()
KINDS = ("hello", "stream", "key", "idle")
_MAX_IDLE = 500
_LEAST, _LONGEST_S = 20, 60.0
_ANSWER_S = 0.3


def greeting(mechanism: bytes) -> bytes:
    """ZMTP 3.0's: signature, version, mechanism, as-server, filler."""
    return b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + mechanism.ljust(20, b"\0") + b"\0" + bytes(31)


def frame(flags: int, body: bytes) -> bytes:
    assert len(body) < 256
    return bytes((flags, len(body))) + body


READY = frame(4, b"\x05READY" + b"\x0bSocket-Type" + (6).to_bytes(4, "big") + b"DEALER")
KEY = frame(4, b"\x05HELLO\x01\x00" + bytes(72) + os.urandom(32) + os.urandom(8) + os.urandom(80))


def flood(kind: str, host: str, port: int, seconds: float, least: int = 0) -> int:
    """Returns how often it connected, or how many messages it sent (`stream`): at least so often, however long that
    takes on a busy machine."""
    began, count = time.monotonic(), 0
    until = began + seconds
    said = {"key": greeting(b"CURVE") + KEY, "idle": b""}.get(kind, greeting(b"NULL") + READY)
    held: list[socket.socket] = []
    while time.monotonic() < (until if count >= least else began + _LONGEST_S):
        try:
            door = socket.create_connection((host, port), _ANSWER_S)
        except OSError:
            time.sleep(0.001)
            continue
        count += 1
        held.append(door)
        if len(held) > (_MAX_IDLE if kind == "idle" else 20):  # it may read what was said before the end of the line
            held.pop(0).close()
        with suppress(OSError):
            door.sendall(said)
            if kind in ("hello", "stream") and _is_ready(door):
                door.sendall(frame(0, HELLO))
                while kind == "stream" and time.monotonic() < until:
                    door.sendall(frame(0, HELLO) * 100)
                    count += 100
    for door in held:
        door.close()
    return count


def _is_ready(door: socket.socket) -> bool:
    """Read the other side's greeting and its READY; False when it hung up instead."""
    heard = 0
    while heard < len(greeting(b"")) + len(READY):
        if not (got := door.recv(256)):
            return False
        heard += len(got)
    return True


@contextmanager
def flooded(address: str, kinds: tuple[str, ...], seconds: float) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that flood `address` ("tcp://HOST:PORT"), one per kind, which end with the block."""
    command = [sys.executable, __file__]
    where = address.removeprefix("tcp://")
    with ExitStack() as stack:
        started = []
        for kind in kinds:
            line = [*command, kind, where, str(seconds)]
            process = stack.enter_context(subprocess.Popen(line, stdout=subprocess.PIPE, text=True))
            stack.callback(process.kill)
            started.append(process)
        yield started


if __name__ == "__main__":
    kind, where, seconds = sys.argv[1:]
    host, _, port = where.rpartition(":")
    print(kind, flood(kind, host, int(port), float(seconds), _LEAST), flush=True)
