"""Ranks on another host that each have a process of their own: a line to their keeper there (`workers/node.py`),
and a handle for each that the launcher uses as it uses a process."""

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

from workers.node import SAYS
from workers.watchdog import signal_group

_LOOK_S = 0.02


class NodeLine:
    """A remote shell whose standard input and output lead to a keeper. Never waits for it: what is to be said before
    the keeper is there is kept."""

    def __init__(self, host: str, shell: subprocess.Popen[bytes], script: str, log_path: Path) -> None:
        """`script` is what the shell reads to become the keeper; what it says besides goes to the log."""
        assert shell.stdout is not None
        self.host, self.shell, self.log_path = host, shell, log_path
        self._ready = False
        self._waiting: list[str] = []
        self._codes: dict[str, int] = {}  # key → how it ended
        self._read = b""
        os.set_blocking(shell.stdout.fileno(), False)
        self._write(script)

    @property
    def ended(self) -> bool:
        return self.shell.poll() is not None

    @property
    def heard(self) -> bool:
        """Whether the keeper has answered."""
        return self._ready

    def say(self, message: Mapping[str, Any]) -> None:
        # A shell may read more than the script at once, so nothing follows it until the keeper has answered.
        self._waiting.append(json.dumps(message) + "\n")
        self.look()

    def look(self) -> None:
        """Take in what the keeper has said."""
        assert self.shell.stdout is not None
        while True:
            try:
                more = os.read(self.shell.stdout.fileno(), 65536)
            except (BlockingIOError, ValueError):  # nothing yet; closed
                break
            if not more:
                break
            *lines, self._read = (self._read + more).split(b"\n")
            for line in lines:
                self._take(line.decode(errors="replace"))
        if self._ready and self._waiting:
            said, self._waiting = self._waiting, []
            self._write("".join(said))

    def code_of(self, key: str) -> int | None:
        """How a rank ended: its exit code, or that of the line, which takes all with it. None: it runs."""
        ended = self.shell.poll()  # before the look: what the keeper said last is then there to be read
        self.look()
        return self._codes.get(key, ended)

    def has_told(self, key: str) -> bool:
        """Whether the keeper itself has said that this rank ended."""
        return key in self._codes

    def give_up(self) -> None:
        """The host does not answer: end the shell. A keeper that still lives ends its ranks when it notices."""
        signal_group(self.shell.pid, signal.SIGKILL)
        self.shell.wait()

    def close(self) -> None:
        """Take in the last words of an ended shell."""
        assert self.shell.stdout is not None
        assert self.shell.stdin is not None
        self.look()
        self.shell.stdout.close()
        with suppress(BrokenPipeError):  # words that it did not live to read
            self.shell.stdin.close()

    def _take(self, line: str) -> None:
        if not line.startswith(SAYS):
            with self.log_path.open("a", encoding="utf-8") as log_file:
                log_file.write(line + "\n")
            return
        message = json.loads(line.removeprefix(SAYS))
        if "ended" in message:
            self._codes[message["ended"]] = int(message["code"])
        self._ready = self._ready or "ready" in message

    def _write(self, text: str) -> None:
        assert self.shell.stdin is not None
        try:
            self.shell.stdin.write(text.encode())
            self.shell.stdin.flush()
        except (BrokenPipeError, ValueError):
            return  # it has ended, or the line was given up: that is noticed as with any process


class FarRank:
    """A rank behind a line: as much of `Popen` as a launcher needs."""

    def __init__(self, line: NodeLine, key: str) -> None:
        self.line, self.key = line, key

    def start(self, command: Sequence[str], env: Mapping[str, str], log_path: Path) -> None:
        self.line.say({"start": self.key, "command": list(command), "env": dict(env), "log": str(log_path)})

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        return self.line.code_of(self.key)

    def kill(self, timeout_s: float) -> bool:
        """SIGKILL it and all that it started. Whether its host says in time that it has ended."""
        self.line.say({"kill": self.key})
        deadline = time.monotonic() + timeout_s
        while self.poll() is None and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        return self.has_told

    @property
    def has_told(self) -> bool:
        """Whether its host has said that it ended; else the line did, and took it along."""
        return self.line.has_told(self.key)
