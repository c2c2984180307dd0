"""Check every other host of a run before anything is made or started. `remote_check.py` is the other end."""

from __future__ import annotations

import json
import os
import socket
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from rlctl.processes.launch import base_environment, remote_script, tail
from rlctl.processes.node_connection import NodeConnection
from rlctl.processes.remote_check import Questions
from rlctl.processes.shells import Cluster
from specs.errors import Problem, SpecError

_LOOK_S = 0.02
_SAID_S = 10.0  # until it is said which hosts have not answered


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
        own = replace(questions, host=self.name, gpus=1 + max(self.devices, default=-1), files=self.files)
        return (self.python, "-m", "rlctl.processes.remote_check", json.dumps(asdict(own)))


def check_hosts(
    hosts: Sequence[RemoteHost], cluster: Cluster, questions: Questions, within_s: float, say: Callable[[str], None]
) -> None:
    """Raise SpecError with what keeps hosts from their part, all checked at once for at most `within_s` seconds. `say`
    is told which of them are slow."""
    with ExitStack() as stack:
        doors = [stack.enter_context(_door(questions.address, port)) for port in questions.ports]
        questions = replace(questions, ports=[door.getsockname()[1] for door in doors])
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        checks = []
        for number, host in enumerate(hosts):
            log_path, env = folder / f"{number}.log", {"PYTHONPATH": host.python_path, "PYTHONSAFEPATH": "1"}
            shell = cluster.shell(host.number, sorted(host.devices), base_environment(), log_path)
            script = remote_script(env, host.check(questions))
            checks.append((host, NodeConnection(host.name, shell, script, log_path)))
        started, say_after_s = time.monotonic(), _SAID_S
        while slow := [host.name for host, check in checks if check.shell.poll() is None]:
            if (waited_s := time.monotonic() - started) > within_s:
                break
            if waited_s > say_after_s:
                say(f"waiting for an answer from {', '.join(slow)}")
                say_after_s = within_s
            time.sleep(_LOOK_S)
            for _, check in checks:
                check.receive()
        if problems := [problem for host, check in checks if (problem := _problem(host, check, within_s))]:
            raise SpecError(problems)


def _problem(host: RemoteHost, check: NodeConnection, within_s: float) -> Problem | None:
    """Return what was found; of a host that has not answered, that. End the shell."""
    code = check.shell.poll()
    if code is None:
        check.shell.kill()
    check.close()
    if check.checked:
        return check.problem
    why, hint = f"no answer within {within_s:g} s", "raise run.start_timeout_s if it is only slow"
    if code is not None:
        why = f"exit code {code}"
        hint = f"{host.python} must exist there, with rlctl's folder and {os.getcwd()}, as on this host"
    last = tail(check.log_path, 1).strip()
    reason = f"{why}: {last}" if last else why
    return Problem("cluster", f"host {host.name} cannot be used: {reason}", hint, host.name)


def _door(address: str, port: int) -> socket.socket:
    """Listen at a port (0: one that is free), or where another process has it, reported elsewhere, at a free one."""
    try:
        return socket.create_server((address, port), backlog=1024)
    except OSError:
        return socket.create_server((address, 0), backlog=1024)
