"""Check every other host of a run before anything is made or started. `remote_check.py` is the other end."""

from __future__ import annotations

import json
import shlex
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field

from rlctl.processes.launch import remote_script
from rlctl.processes.remote_check import MARK, HostReply, Questions
from specs.errors import Problem, SpecError
from workers.watchdog import signal_group

CHECK_TIMEOUT_S = 20.0
_ENTERED = "rlctl-shell"  # printed by a shell on the host, before anything that may fail there


@dataclass(frozen=True)
class RemoteHost:
    """A host by its number in the run, its name, and the shell that leads there; one of the interpreters that roles
    have there; `devices`: GPUs that they name; `files`: path → checksum of what they read beside models."""

    number: int
    name: str
    shell: tuple[str, ...]
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


@dataclass(frozen=True)
class _Result:
    """The outcome of a check. `unreached`: why there is no way to the host, or from it to this one."""

    host: RemoteHost
    problem: Problem | None
    unreached: str = ""


def check_hosts(
    hosts: Sequence[RemoteHost], questions: Questions, may_lack: Callable[[frozenset[int]], bool]
) -> dict[str, str]:
    """Raise SpecError with what keeps hosts from their part, all checked at once for at most CHECK_TIMEOUT_S. Where the
    run `may_lack` all hosts that cannot be reached: the name of each of them, and why."""
    if not hosts:
        return {}
    with ExitStack() as stack:
        doors = [stack.enter_context(_door(questions["address"], port)) for port in questions["ports"]]
        questions = Questions(**{**questions, "ports": [door.getsockname()[1] for door in doors]})
        pool = stack.enter_context(ThreadPoolExecutor(len(hosts)))
        results = [*pool.map(lambda host: _check(host, questions), hosts)]
    unreached = [result for result in results if result.unreached]
    if not may_lack(frozenset(result.host.number for result in unreached)):
        unreached = []
    if problems := [result.problem for result in results if result.problem and result not in unreached]:
        raise SpecError(problems)
    return {result.host.name: result.unreached for result in unreached}


def _door(address: str, port: int) -> socket.socket:
    """Listen at a port (0: one that is free), or where another process has it, reported elsewhere, at a free one."""
    try:
        return socket.create_server((address, port), backlog=1024)
    except OSError:
        return socket.create_server((address, 0), backlog=1024)


def _check(host: RemoteHost, questions: Questions) -> _Result:
    env = {"PYTHONPATH": host.python_path, "PYTHONSAFEPATH": "1"}
    script = f"echo {_ENTERED}\n" + remote_script(env, host.check(questions))
    try:
        process = subprocess.Popen(
            host.shell, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            errors="replace", start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        return _Result(host, Problem("cluster.remote_shell", f"cannot be started: {error.strerror}", "", host.shell[0]))
    try:
        output, why = process.communicate(script, CHECK_TIMEOUT_S)[0], ""
    except subprocess.TimeoutExpired:
        signal_group(process.pid, signal.SIGKILL)
        output, why = process.communicate()[0], f"no answer within {CHECK_TIMEOUT_S:g} s"
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    for line in lines:
        if line.startswith(MARK):
            reply: HostReply = json.loads(line.removeprefix(MARK))
            problem = Problem(**reply["problem"]) if reply["problem"] else None
            return _Result(host, problem, reply["dial"] and f"it cannot reach this host: {reply['dial']}")
    last = next((line for line in reversed(lines) if line != _ENTERED), "no output")
    reason = why or f"exit code {process.returncode}: {last}"
    missing = "" if why else f"; {host.python} must exist there, with rlctl's folder, as on this host"
    hint = f"try it by hand: echo hostname | {shlex.join(host.shell)}{missing}"
    broken = Problem("cluster.hostfile", f"host {host.name} cannot be used: {reason}", hint, host.name)
    return _Result(host, broken, "" if _ENTERED in lines else reason)
