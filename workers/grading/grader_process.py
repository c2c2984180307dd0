"""Handle one grading process in the parent: start, send a job, read results, kill."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from workers.watchdog import kill_marked

KILL_WAIT_S = 10.0
_MARK = "RLCTL_GRADER"
_KEPT = ("RLCTL_RUN_ID", "RLCTL_CHECK")  # by which what reward code started is found when a run, or a check, ends
READ_BYTES = 1 << 16


class GraderProcess:
    """A child process with non-blocking pipes.

    It dies with the *thread* that started it (that is how PR_SET_PDEATHSIG works), so it belongs to a thread that
    lives as long as the role.
    """

    def __init__(
        self,
        hello: bytes,
        log_path: Path,
        start_timeout_s: float,
        *,
        python: str,
        env: Mapping[str, str],
    ) -> None:
        """`env`: what it has besides this process's environment."""
        self._mark = secrets.token_hex(8)
        here = {name: value for name, value in os.environ.items() if name in _KEPT or not name.startswith("RLCTL_")}
        env = {**here, **env, _MARK: self._mark, "PYTHONUNBUFFERED": "1", "PYTHONHASHSEED": "0"}
        env["PYTHONPATH"] = _package_path(env.get("PYTHONPATH", ""))
        with open(log_path, "ab") as log:
            self.process = subprocess.Popen(
                [python, "-P", "-X", "faulthandler", "-m", "workers.grading.child", str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=env,
                start_new_session=True,  # `kill` also ends processes that reward code started
            )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.stdin, self.stdout = self.process.stdin.fileno(), self.process.stdout.fileno()
        os.set_blocking(self.stdin, False)
        os.set_blocking(self.stdout, False)
        self.ready = False
        self.job: deque[int] = deque()  # indices of samples that it has not graded yet, in order
        self._given_at, self._given = 0.0, 1  # when the last job was, and its samples
        self.deadline = time.monotonic() + start_timeout_s
        self._out, self._in, self._eof = bytearray(hello), bytearray(), False

    @property
    def idle(self) -> bool:
        return self.ready and not self.job and not self._out

    @property
    def wants_to_write(self) -> bool:
        return bool(self._out)

    @property
    def closed(self) -> bool:
        """Tell whether its output has ended, as far as it was read."""
        return self._eof

    @property
    def dead(self) -> bool:
        return self._eof or self.process.poll() is not None

    @property
    def seconds_per_sample(self) -> float:
        """Return what each sample of the last job has taken."""
        return (time.monotonic() - self._given_at) / self._given

    def give(self, indices: Sequence[int], job: dict[str, Any], timeout_s: float) -> None:
        assert self.idle
        self.job.extend(indices)
        self._given_at, self._given = time.monotonic(), len(indices)
        self._out += encode(job)
        self.deadline = time.monotonic() + timeout_s
        self.write()

    def write(self) -> None:
        """Write as much as the pipe accepts. A closed pipe is ignored here; `dead` detects it."""
        try:
            while self._out:
                del self._out[: os.write(self.stdin, self._out[:READ_BYTES])]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._out.clear()

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yield messages that have arrived. Output that is not a message kills the process."""
        self._read()
        while (end := self._in.find(b"\n")) >= 0:
            line = bytes(self._in[:end])
            del self._in[: end + 1]
            try:
                message = json.loads(line)
            except ValueError:
                message = None
            if not isinstance(message, dict):
                self.kill()
                return
            yield message

    def _read(self) -> None:
        full = True
        with suppress(BlockingIOError):
            while full:  # a short read has emptied the pipe
                chunk = os.read(self.stdout, READ_BYTES)
                self._in += chunk
                self._eof, full = not chunk, len(chunk) == READ_BYTES

    def kill(self) -> None:
        """Kill the process and all that it started, in other sessions too; earlier output can still be read."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # stuck in a system call: it dies when that returns
            self.process.wait(KILL_WAIT_S)
        kill_marked(f"{_MARK}={self._mark}", KILL_WAIT_S)

    def close(self) -> None:
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()

    def end_words(self) -> str:
        """Say how it ended: a signal's name or an exit status."""
        code = self.process.poll()
        if code is None or code >= 0:
            return f"the process ended with status {code}" if code is not None else "the process closed its pipe"
        try:
            return f"the process was killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"the process was killed by signal {-code}"


def encode(message: dict[str, Any]) -> bytes:
    """Encode a JSON line. Values that JSON does not know (dates, decimals, bytes in a Parquet row) travel as text."""
    return json.dumps(message, default=str, separators=(",", ":")).encode() + b"\n"


def _package_path(theirs: str) -> str:
    ours = str(Path(__file__).resolve().parents[2])
    return os.pathsep.join([ours, *(part for part in theirs.split(os.pathsep) if part and part != ours)])
