"""The grading process of a trial: it imports reward functions by the very code that grades in a run, and then grades
what it is asked to.

The file is the person's: it may print, hang, exit or crash. What it writes to its output is lost, no bytecode is left
behind, and everything that it started ends with it.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlctl.preflight.interpreters import own_path
from rlctl.processes.placement import package_root
from specs.schema.spec import Spec
from workers.grading.grader_process import encode
from workers.watchdog import kill_marked

MARK = "RLCTL_CHECK"  # in the environment of what a check starts, and of all that this starts in turn
_KILL_S = 5.0


class NoGrade(Exception):
    """Why a call gave no grade, in words: the process ended, or (`slow`) it took too long."""

    def __init__(self, why: str, *, slow: bool = False) -> None:
        super().__init__(why)
        self.slow = slow


class TrialProcess:
    """One process, in the reward role's interpreter and environment."""

    def __init__(self, spec: Spec, spec_dir: Path) -> None:
        mark = secrets.token_hex(8)
        env = {name: value for name, value in os.environ.items() if not name.startswith("RLCTL_")} | spec.reward.env
        env["PYTHONPATH"] = os.pathsep.join(part for part in (str(package_root()), env.get("PYTHONPATH", "")) if part)
        env[MARK] = mark
        python = own_path(spec.reward, spec_dir) or sys.executable
        command = [python, "-B", "-P", "-m", "workers.grading.child", str(os.getpid())]
        pipe, null = subprocess.PIPE, subprocess.DEVNULL
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=null, env=env, start_new_session=True)
        self._mark = f"{MARK}={mark}"
        self._owed = 0  # grades that were asked for and have not been read

    def begin(self, hello: dict[str, Any], job: dict[str, Any] | None) -> None:
        """Let it import what `hello` names, and then grade the job's items. Waits for nothing."""
        self._write(hello)
        self._ask(job) if job else None

    def _ask(self, job: dict[str, Any]) -> None:
        self._owed += len(job["items"])
        self._write(job)

    def _write(self, message: dict[str, Any]) -> None:
        """A line of the grader's protocol. A process that has ended says so when it is read from."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(encode(message))
            self.process.stdin.flush()

    def given(self, timeout_s: float) -> Mapping[str, str] | tuple[str, str]:
        """What each parameter gets, or what is wrong and a hint, by the first line. The process may go on: its threads
        and children need not end. Raises NoGrade where it takes longer."""
        try:
            message = json.loads(self._next_line(timeout_s))
            return message["given"][0] if "ready" in message else (str(message["error"]), str(message["hint"]))
        except (ValueError, KeyError, TypeError):
            code = self.process.wait(_KILL_S)
            ended = f"ends the process (status {code})"
            how = f"kills the process ({signal.Signals(-code).name})" if code < 0 else ended
            return f"importing it {how}", "import it with python to see why"

    def grades(self, each_s: float, within_s: float = math.inf) -> Iterator[dict[str, Any]]:
        """The grades that were asked for, in order: as many as are begun within `within_s`. Raises NoGrade where one
        takes longer than `each_s`, or the process ends."""
        until = time.monotonic() + within_s
        while self._owed and time.monotonic() <= until:
            try:
                line = json.loads(self._next_line(each_s))
            except ValueError:
                raise NoGrade("the process ended") from None
            self._owed -= 1
            yield line

    def graded(self, job: dict[str, Any], each_s: float, within_s: float = math.inf) -> Iterator[dict[str, Any]]:
        """Ask for a job's items, and read their grades. Raises NoGrade too while it is at work on an earlier job."""
        if self._owed:
            raise NoGrade("it is still at work on what it was called with before", slow=True)
        self._ask(job)
        yield from self.grades(each_s, within_s)

    def _next_line(self, timeout_s: float) -> bytes:
        """What the process writes up to a line break, or its end; what follows is left in the pipe."""
        assert self.process.stdout is not None
        line, deadline = b"", time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise NoGrade(f"it took more than {timeout_s:g} s", slow=True)
                byte = os.read(self.process.stdout.fileno(), 1)
                if not byte:
                    break
                line += byte
        return line

    def end(self) -> None:
        """The process, and what it has started, in sessions of their own too."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        kill_marked(self._mark, _KILL_S)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()


def job_of(samples: Sequence[tuple[tuple[str, Mapping[str, Any]], Sequence[str]]]) -> dict[str, Any]:
    """A job of the grader's protocol. `samples`: a prompt with its row, and completions of it."""
    rows = {str(number): sample for number, (sample, _) in enumerate(samples)}
    texts = [(str(number), text) for number, (_, completions) in enumerate(samples) for text in completions]
    return {"rows": rows, "items": [[index, key, text, len(text)] for index, (key, text) in enumerate(texts)]}
