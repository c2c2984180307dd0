"""Processes on another host: the connection to their supervisor there (`workers/node.py`), and a handle for each that
the launcher uses as it uses a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlctl.processes.remote_check import MARK
from workers.node import PREFIX
from workers.watchdog import signal_group

_LOOK_S = 0.02


class NodeConnection:
    """A shell whose standard input and output lead to a supervisor. It never waits: messages that are sent before the
    supervisor is ready are kept, for a shell may read more than its script at once."""

    def __init__(self, host: str, shell: subprocess.Popen[bytes], script: str, log_path: Path) -> None:
        """Have the shell become the supervisor by reading `script`. Its other output goes to the log."""
        assert shell.stdout is not None
        self.host, self.shell, self.log_path = host, shell, log_path
        self.ready = False  # the supervisor has answered
        self.refused = ""  # what a check of the host has found
        self.codes: dict[str, int] = {}  # key → how it ended, as the supervisor reported it
        self._kept: list[str] = []
        self._unread = b""
        os.set_blocking(shell.stdout.fileno(), False)
        self._write(script)

    @property
    def ended(self) -> bool:
        return self.shell.poll() is not None

    def send(self, message: Mapping[str, Any]) -> None:
        self._kept.append(json.dumps(message) + "\n")
        self.receive()

    def keep_open(self) -> None:
        """Send an empty line, which the supervisor does not read."""
        self._write("\n")

    def receive(self) -> None:
        """Take in what the supervisor has sent."""
        assert self.shell.stdout is not None
        with suppress(BlockingIOError, ValueError):  # no more yet; closed
            while more := os.read(self.shell.stdout.fileno(), 65536):
                *lines, self._unread = (self._unread + more).split(b"\n")
                for line in lines:
                    self._handle(line.decode(errors="replace"))
        if self.ready and self._kept:
            kept, self._kept = self._kept, []
            self._write("".join(kept))

    def hang_up(self) -> None:
        """End the supervisor's input, with which it ends all that it started."""
        assert self.shell.stdin is not None
        with suppress(BrokenPipeError):  # what it did not live to read
            self.shell.stdin.close()

    def give_up(self) -> None:
        """End the shell of a host that does not answer. A supervisor that still lives there ends its processes then."""
        signal_group(self.shell.pid, signal.SIGKILL)
        self.shell.wait()

    def close(self) -> None:
        """Take in what an ended shell has left."""
        assert self.shell.stdout is not None
        self.receive()
        self.shell.stdout.close()
        self.hang_up()

    def _handle(self, line: str) -> None:
        if line.startswith(MARK):
            problem = json.loads(line.removeprefix(MARK))["problem"]
            self.refused = f"{problem['message']} ({problem['hint']})" if problem else ""
        elif line.startswith(PREFIX):
            message = json.loads(line.removeprefix(PREFIX))
            self.ready = self.ready or "ready" in message
            if "ended" in message:
                self.codes[message["ended"]] = int(message["code"])
        else:
            with self.log_path.open("a", encoding="utf-8") as log_file:
                log_file.write(line + "\n")

    def _write(self, text: str) -> None:
        assert self.shell.stdin is not None
        with suppress(BrokenPipeError, ValueError):  # it has ended, which is noticed as with any process
            self.shell.stdin.write(text.encode())
            self.shell.stdin.flush()


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
