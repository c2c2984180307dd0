"""Ranks on another host that each have a process of their own: a connection to their supervisor there
(`workers/node.py`), and a handle for each that the launcher uses as it uses a process."""

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

from workers.node import PREFIX
from workers.watchdog import signal_group

_LOOK_S = 0.02


class NodeConnection:
    """A remote shell whose standard input and output lead to a supervisor. It never waits: messages that are sent
    before the supervisor is ready are kept."""

    def __init__(self, host: str, shell: subprocess.Popen[bytes], script: str, log_path: Path) -> None:
        """`script` is what the shell reads to become the supervisor; its other output goes to the log."""
        assert shell.stdout is not None
        self.host, self.shell, self.log_path = host, shell, log_path
        self.ready = False  # the supervisor has answered
        self._kept = [script]
        self._codes: dict[str, int] = {}  # key → how it ended
        self._unread = b""
        os.set_blocking(shell.stdout.fileno(), False)

    @property
    def ended(self) -> bool:
        return self.shell.poll() is not None

    def open(self) -> None:
        """Have the shell become the supervisor."""
        script, *self._kept = self._kept
        self._write(script)

    def send(self, message: Mapping[str, Any]) -> None:
        """Send once the supervisor is ready: a shell may read more than the script at once."""
        self._kept.append(json.dumps(message) + "\n")
        self.receive()

    def receive(self) -> None:
        """Take in what the supervisor has sent."""
        assert self.shell.stdout is not None
        while True:
            try:
                more = os.read(self.shell.stdout.fileno(), 65536)
            except (BlockingIOError, ValueError):  # nothing yet; closed
                break
            if not more:
                break
            *lines, self._unread = (self._unread + more).split(b"\n")
            for line in lines:
                self._handle(line.decode(errors="replace"))
        if self.ready and self._kept:
            kept, self._kept = self._kept, []
            self._write("".join(kept))

    def code_of(self, key: str) -> int | None:
        """Return how a rank ended: its exit code, or that of the connection, which takes all with it. None: it runs."""
        ended = self.shell.poll()  # before the look: the supervisor's last message is then there to be read
        self.receive()
        return self._codes.get(key, ended)

    def has_reported(self, key: str) -> bool:
        """Return whether the supervisor itself reported the end of this rank."""
        return key in self._codes

    def give_up(self) -> None:
        """End the shell of a host that does not answer. A supervisor that still lives there ends its ranks then."""
        signal_group(self.shell.pid, signal.SIGKILL)
        self.shell.wait()

    def close(self) -> None:
        """Take in what an ended shell has left."""
        assert self.shell.stdout is not None
        assert self.shell.stdin is not None
        self.receive()
        self.shell.stdout.close()
        with suppress(BrokenPipeError):  # what it did not live to read
            self.shell.stdin.close()

    def _handle(self, line: str) -> None:
        if not line.startswith(PREFIX):
            with self.log_path.open("a", encoding="utf-8") as log_file:
                log_file.write(line + "\n")
            return
        message = json.loads(line.removeprefix(PREFIX))
        if "ended" in message:
            self._codes[message["ended"]] = int(message["code"])
        self.ready = self.ready or "ready" in message

    def _write(self, text: str) -> None:
        assert self.shell.stdin is not None
        with suppress(BrokenPipeError, ValueError):  # it has ended, which is noticed as with any process
            self.shell.stdin.write(text.encode())
            self.shell.stdin.flush()


class RemoteRank:
    """A rank behind a connection: as much of `Popen` as a launcher needs."""

    def __init__(self, node: NodeConnection, key: str) -> None:
        self.node, self.key = node, key

    def start(self, command: Sequence[str], env: Mapping[str, str], log_path: Path) -> None:
        self.node.send({"start": self.key, "command": list(command), "env": dict(env), "log": str(log_path)})

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        return self.node.code_of(self.key)

    def kill(self, timeout_s: float) -> bool:
        """SIGKILL it and all that it started; return whether its host reports in time that it has ended."""
        self.node.send({"kill": self.key})
        deadline = time.monotonic() + timeout_s
        while self.poll() is None and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        return self.has_reported

    @property
    def has_reported(self) -> bool:
        """Return whether its host reported its end; else the connection ended, and took it along."""
        return self.node.has_reported(self.key)
