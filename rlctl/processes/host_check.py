"""Check every other host of a run before anything is made or started. `remote_check.py` is the other end."""

from __future__ import annotations

import json
import os
import socket
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from rlctl.processes.launch import base_environment, remote_script
from rlctl.processes.remote_check import MARK, HostReply, Questions
from rlctl.processes.shells import Cluster, Shell
from specs.errors import Problem, SpecError

CHECK_TIMEOUT_S = 30.0
_LOOK_S = 0.02


@dataclass(frozen=True)
class RemoteHost:
    """A host by its number in the run and its name; one of the interpreters that roles have there; `devices`: GPUs that
    they name; `files`: path → checksum of what they read beside models."""

    number: int
    name: str
    python: str
    python_path: str
    devices: frozenset[int] = frozenset()
    files: Mapping[str, str] = field(default_factory=dict)

    def check(self, questions: Questions) -> tuple[str, ...]:
        """Return the command that checks the host there."""
        own = Questions(
            **{**questions, "host": self.name, "gpus": 1 + max(self.devices, default=-1), "files": dict(self.files)}
        )
        return (self.python, "-m", "rlctl.processes.remote_check", json.dumps(own))


def check_hosts(hosts: Sequence[RemoteHost], cluster: Cluster, questions: Questions) -> None:
    """Raise SpecError with what keeps hosts from their part, all checked at once for at most CHECK_TIMEOUT_S."""
    with ExitStack() as stack:
        doors = [stack.enter_context(_door(questions["address"], port)) for port in questions["ports"]]
        questions = Questions(**{**questions, "ports": [door.getsockname()[1] for door in doors]})
        log_path = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "log"
        checks = [_Check(host, cluster, questions, log_path) for host in hosts]
        deadline = time.monotonic() + CHECK_TIMEOUT_S
        while any([check.is_running() for check in checks]) and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        if problems := [problem for check in checks if (problem := check.problem())]:
            raise SpecError(problems)


class _Check:
    """A check of one host, while it runs."""

    def __init__(self, host: RemoteHost, cluster: Cluster, questions: Questions, log_path: Path) -> None:
        self._host, self._log_path, self._output = host, log_path, b""
        env = {"PYTHONPATH": host.python_path, "PYTHONSAFEPATH": "1"}
        self._shell: Shell = cluster.shell(host.number, sorted(host.devices), base_environment(), log_path)
        self._shell.write(remote_script(env, host.check(questions)))

    def is_running(self) -> bool:
        """Take in what the shell has written; return whether it runs still."""
        ended = self._shell.poll() is not None
        self._output += self._shell.read()
        return not ended

    def problem(self) -> Problem | None:
        """Return what was found; of a host that has not answered, that. End the shell."""
        why = f"no answer within {CHECK_TIMEOUT_S:g} s" if self.is_running() else f"exit code {self._shell.poll()}"
        if self._shell.poll() is None:
            self._shell.kill()
        self._shell.close()
        lines = [line.strip() for line in self._output.decode(errors="replace").splitlines() if line.strip()]
        for line in lines:
            if line.startswith(MARK):
                reply: HostReply = json.loads(line.removeprefix(MARK))
                return Problem(**reply["problem"]) if reply["problem"] else None
        if self._log_path.exists():
            lines += self._log_path.read_text(errors="replace").splitlines()
        reason = f"{why}: {lines[-1]}" if lines else why
        hint = f"{self._host.python} must exist there, with rlctl's folder and {os.getcwd()}, as on this host"
        name = self._host.name
        return Problem("cluster", f"host {name} cannot be used: {reason}", hint, name)


def _door(address: str, port: int) -> socket.socket:
    """Listen at a port (0: one that is free), or where another process has it, reported elsewhere, at a free one."""
    try:
        return socket.create_server((address, port), backlog=1024)
    except OSError:
        return socket.create_server((address, 0), backlog=1024)
