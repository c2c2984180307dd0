"""Supervise processes for a driver on another host, and end them with the connection to it.

`python -m workers.node` talks JSON with the driver, an object per line. When its standard input closes (the driver
ended, or the connection broke), everything that it started on this host is ended:

    in    {"start": KEY, "command": […], "env": {…}, "log": PATH}     {"kill": KEY}
    out   {"ready": true}     {"ended": KEY, "code": N}, negative after a signal     {"alive": true}, every 5 s

KEY marks a process and its children in their environment (RLCTL_PROCESS).
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from typing import Any

from workers.watchdog import kill_marked, set_process_name, signal_group

PREFIX = "rlctl-node: "  # before each line to the driver: a login shell may print lines of its own
_GRACE_S = 3.0
_KILL_TIMEOUT_S = 10.0
_LOOK_S = 0.05
_BEAT_S = 5.0
_IDLE_S = 60.0  # with no process left: the connection to a driver that is gone may stay open


class Supervisor:
    """Processes, by key, and the connection to the driver."""

    def __init__(self) -> None:
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._hung_up = False
        self._used = self._beat = time.monotonic()

    def run(self) -> None:
        """Serve the driver until the connection ends."""
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, self._hang_up)
        self._send({"ready": True})
        for message in self._messages():
            if "start" in message:
                self._start(message)
            elif "kill" in message:
                self._kill(message["kill"])
        self._end_all()

    def _messages(self) -> Iterator[Mapping[str, Any]]:
        """Yield the driver's messages; in between, report which processes have ended."""
        read = b""
        while not self._hung_up:
            if select.select([0], [], [], _LOOK_S)[0]:
                more = os.read(0, 65536)
                if not more:
                    return
                *lines, read = (read + more).split(b"\n")
                yield from (json.loads(line) for line in lines if line.strip())
            self._report()

    def _start(self, request: Mapping[str, Any]) -> None:
        marks = {"RLCTL_PROCESS": request["start"], "RLCTL_PARENT_PID": str(os.getpid())}
        with open(request["log"], "ab") as log_file:
            self._running[request["start"]] = subprocess.Popen(
                request["command"],
                env={**os.environ, **request["env"], **marks},
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _kill(self, key: str) -> None:
        if key in self._running:
            signal_group(self._running[key].pid, signal.SIGKILL)  # where no mark can be read
        kill_marked(f"RLCTL_PROCESS={key}", _KILL_TIMEOUT_S)
        self._report()

    def _report(self) -> None:
        for key, process in [*self._running.items()]:
            if (code := process.poll()) is not None:
                del self._running[key]
                self._used = time.monotonic()
                self._send({"ended": key, "code": code})
        if time.monotonic() - self._beat > _BEAT_S:
            self._beat = time.monotonic()
            self._send({"alive": True})
        if not self._running and time.monotonic() - self._used > _IDLE_S:
            self._hung_up = True

    def _end_all(self) -> None:
        running = [*self._running.values()]
        for number, grace_s in ((signal.SIGTERM, _GRACE_S), (signal.SIGKILL, _KILL_TIMEOUT_S)):
            for process in running:
                signal_group(process.pid, number)
            deadline = time.monotonic() + grace_s
            while (running := [one for one in running if one.poll() is None]) and time.monotonic() < deadline:
                time.sleep(_LOOK_S)
        kill_marked(f"RLCTL_PARENT_PID={os.getpid()}", _KILL_TIMEOUT_S)

    def _send(self, message: Mapping[str, Any]) -> None:
        try:
            print(PREFIX + json.dumps(message), flush=True)
        except OSError:
            self._hung_up = True

    def _hang_up(self, *_: object) -> None:
        self._hung_up = True


if __name__ == "__main__":
    set_process_name("rlctl-node")
    Supervisor().run()
