"""Handle one grading process in the parent: start it, send and receive messages within a limit of time, kill it."""

from __future__ import annotations

import json
import os
import secrets
import select
import signal
import subprocess
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from specs.packages import package_path
from workers.grading.output_log import READ_BYTES, log_output
from workers.watchdog import kill_marked, signal_group

KILL_WAIT_S = 10.0
TICK_S = 0.1  # how often a dead process whose pipe is still open is looked for
OUTPUT_WAIT_S = 1.0  # for the last that a process that ended has printed
_MARK = "RLCTL_GRADER"
_KEPT = ("RLCTL_RUN_ID", "RLCTL_PROCESS", "RLCTL_CHECK")  # by which is found what reward code has started


class GraderEnded(Exception):
    """The process was killed: it ended by itself (`cause` "crashes"), or took too long ("timeouts")."""

    def __init__(self, cause: str, text: str) -> None:
        super().__init__(text)
        self.cause = cause


class GraderProcess:
    """A child process that speaks JSON lines. What it has to do is over at its `deadline`.

    It dies with the *thread* that started it (that is how PR_SET_PDEATHSIG works), so it belongs to a thread that
    lives as long as the role.
    """

    def __init__(self, log_path: Path, *, python: str, env: Mapping[str, str]) -> None:
        """`env`: variables besides those of this process."""
        self._mark = secrets.token_hex(8)
        output, self._output = log_output(log_path)
        with open(output, "wb") as log:
            self.process = subprocess.Popen(
                [python, "-P", "-X", "faulthandler", "-m", "workers.grading.child", str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=isolated_variables({**env, _MARK: self._mark}),
                start_new_session=True,  # `kill` also ends processes that reward code started
            )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._stdin, self._stdout = self.process.stdin.fileno(), self.process.stdout.fileno()
        os.set_blocking(self._stdin, False)
        os.set_blocking(self._stdout, False)
        self.job: deque[int] = deque()  # indices of samples that it has not graded yet, in order
        self.deadline = 0.0  # of `time.monotonic()`
        self._in = bytearray()

    @property
    def dead(self) -> bool:
        return self.process.poll() is not None

    def send(self, message: bytes) -> None:
        """Send a line. Raises GraderEnded at the deadline; where the process has ended, `receive` says so."""
        left = memoryview(message)
        with suppress(BrokenPipeError):
            while left:
                self._wait(self._stdin, select.POLLOUT)
                left = left[os.write(self._stdin, left[:READ_BYTES]) :]

    def receive(self) -> dict[str, Any]:
        """Return its next message, which may have come before it ended. Raises GraderEnded."""
        while (end := self._in.find(b"\n")) < 0:
            self._wait(self._stdout, select.POLLIN)
            chunk = os.read(self._stdout, READ_BYTES)
            if not chunk:
                raise self.ended()
            self._in += chunk
        line = bytes(self._in[:end])
        del self._in[: end + 1]
        try:
            message = json.loads(line)
        except ValueError:
            message = None
        if not isinstance(message, dict):  # reward code wrote to the pipe
            raise self.ended()
        return message

    def _wait(self, pipe: int, event: int) -> None:
        """Wait until the pipe can be used. Raises GraderEnded at the deadline, and where it never will."""
        poll = select.poll()
        poll.register(pipe, event)
        while not poll.poll(1000 * max(min(TICK_S, self.deadline - time.monotonic()), 0.0)):
            if self.dead:
                raise self.ended()
            if time.monotonic() > self.deadline:
                self.kill()
                raise GraderEnded("timeouts", "")

    def ended(self) -> GraderEnded:
        """Kill the process; return the error of one that ended, or has to: a signal's name or an exit status."""
        self.kill()
        return GraderEnded("crashes", how_it_ended(self.process.poll()))

    def kill(self) -> None:
        """Kill the process and all that it started, in other sessions too."""
        signal_group(self.process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # stuck in a system call: it dies when that returns
            self.process.wait(KILL_WAIT_S)
        kill_marked(f"{_MARK}={self._mark}", KILL_WAIT_S)
        self._output.join(OUTPUT_WAIT_S)

    def close(self) -> None:
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()


def encode(message: dict[str, Any]) -> bytes:
    """Encode a JSON line. Values that JSON does not know (dates, decimals, bytes in a Parquet row) travel as text."""
    return json.dumps(message, default=str, separators=(",", ":")).encode() + b"\n"


def how_it_ended(code: int | None) -> str:
    """Describe a process by its exit status, or minus the number of the signal that killed it; None: still there."""
    if code is None or code >= 0:
        return "the process closed its pipe" if code is None else f"the process ended with status {code}"
    name = signal.Signals(-code).name if -code in {*signal.Signals} else f"signal {-code}"
    return f"the process was killed by {name}"


def isolated_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a process that runs users' code: of this one, but for those of our own, and `env`, whose
    PYTHONPATH has our packages."""
    here = {name: value for name, value in os.environ.items() if name in _KEPT or not name.startswith("RLCTL_")}
    path = env.get("PYTHONPATH") or package_path(here.get("PYTHONPATH", ""))
    return {**here, **env, "PYTHONUNBUFFERED": "1", "PYTHONHASHSEED": "0", "PYTHONPATH": path}
