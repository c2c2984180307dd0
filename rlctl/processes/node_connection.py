"""Processes on another host: the connection to their supervisor there (`workers/node.py`), and a handle for each that
the launcher uses as it uses a process of its own."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlctl.processes.shells import Shell
from specs.errors import Problem
from workers.node import PREFIX

_LOOK_S = 0.02
_PAUSE_S = 2.0  # between two looks: the driver was stopped, which is not the host's silence


class NodeConnection:
    """A shell that leads to a supervisor. It never waits: messages that are sent before the supervisor is ready are
    kept, for a shell may read more than its script at once."""

    def __init__(self, host: str, shell: Shell, script: str, log_path: Path) -> None:
        """Have the shell become the supervisor by reading `script`. Its other output goes to the log."""
        self.host, self.shell, self.log_path = host, shell, log_path
        self.ready = False  # the supervisor has answered
        self.checked = False  # what checks the host has answered
        self.problem: Problem | None = None  # that it has found
        self.codes: dict[str, int] = {}  # key → how it ended, as the supervisor reported it
        self._heard = self._looked = time.monotonic()
        self._kept: list[str] = []
        self._unread = b""
        shell.write(script)

    def send(self, message: Mapping[str, Any]) -> None:
        self._kept.append(json.dumps(message) + "\n")
        self.receive()

    def receive(self) -> None:
        """Take in what the supervisor has sent."""
        now, text = time.monotonic(), self.shell.read()
        if text or now - self._looked > _PAUSE_S:
            self._heard = now
        self._looked = now
        *lines, self._unread = (self._unread + text).split(b"\n")
        for line in lines:
            self._handle(line.decode(errors="replace"))
        if self.ready and self._kept:
            kept, self._kept = self._kept, []
            self.shell.write("".join(kept))

    @property
    def silent_s(self) -> float:
        """Return for how long a supervisor that was ready has said nothing, not even that it lives."""
        return self._looked - self._heard if self.ready else 0.0

    def close(self) -> None:
        """Take in what an ended shell has left."""
        self.receive()
        self.shell.close()

    def _handle(self, line: str) -> None:
        if line.startswith(PREFIX):
            message = json.loads(line.removeprefix(PREFIX))
            self.ready = self.ready or "ready" in message
            if "ended" in message:
                self.codes[message["ended"]] = int(message["code"])
            if "problem" in message:
                found, self.checked = message["problem"], True
                self.problem = Problem(**found) if found else None
        elif line:
            with self.log_path.open("a", encoding="utf-8") as log_file:
                log_file.write(line + "\n")


class RemoteProcess:
    """A process behind a connection: as much of `Popen` as a launcher needs."""

    def __init__(self, node: NodeConnection, key: str) -> None:
        self.node, self.key = node, key

    def start(self, command: Sequence[str], env: Mapping[str, str], log_path: Path) -> None:
        self.node.send({"start": self.key, "command": list(command), "env": dict(env), "log": str(log_path)})

    def poll(self) -> int | None:
        """Return its exit code, or that of the connection, which takes all with it. None: it runs."""
        ended = self.node.shell.poll()  # before the look: the supervisor's last message is then there to be read
        self.node.receive()
        return self.node.codes.get(self.key, ended)

    def kill(self, timeout_s: float) -> bool:
        """SIGKILL it and all that it started; return whether its host reports in time that it has ended."""
        self.node.send({"kill": self.key})
        deadline = time.monotonic() + (timeout_s if self.node.ready else 0.0)
        while self.poll() is None and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        return self.has_reported

    @property
    def has_reported(self) -> bool:
        """Return whether its host reported its end; else the connection ended, and took it along."""
        return self.key in self.node.codes
