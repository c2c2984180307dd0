"""Check every other host of a run before anything is made or started: can it do its part, and do the hosts whose ranks
connect to each other reach one another? `remote_check.py` is the other end."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from rlctl import __version__
from rlctl.processes.launch import remote_script
from rlctl.processes.remote_check import MARK, HostReply, Questions, this_machine, unreached
from specs.errors import Problem, SpecError
from workers.watchdog import signal_group

PROBE_TIMEOUT_S = 20.0
CLOCKS_APART_S = 60.0  # longer than an answer takes
HERE = 0  # number of the driver's host
_ENDS_S = 5.0
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


@dataclass(frozen=True)
class ReachabilityGroup:
    """Hosts, by number, whose ranks connect to each other, and whose ranks these are."""

    hosts: frozenset[int]
    what: str


class HostChecks:
    """The checks that are under way. Another thread may end them."""

    def __init__(self) -> None:
        self._lock, self._open, self._is_stopped = threading.Lock(), list[_HostCheck](), False

    def open(self, host: RemoteHost, questions: Questions) -> _HostCheck:
        with self._lock:
            check = _HostCheck(host, questions)
            self._open = [check, *(one for one in self._open if one.is_open)]
            if self._is_stopped:
                check.kill()
            return check

    def stop(self) -> None:
        """End all that are open, and whatever is opened later."""
        with self._lock:
            self._is_stopped = True
            for check in self._open:
                check.kill()


def check_hosts(
    hosts: Sequence[RemoteHost],
    groups: Sequence[ReachabilityGroup],
    questions: Questions,
    may_lack: Callable[[frozenset[int]], bool] = lambda numbers: False,
    checks: HostChecks | None = None,
) -> dict[str, str]:
    """Raise SpecError with what keeps hosts from their part, all asked at once for at most PROBE_TIMEOUT_S, and then,
    if nothing does, which of them do not reach one another. Where the run `may_lack` all hosts that cannot be reached:
    the name of each of them, and why."""
    checks = checks or HostChecks()
    if not hosts:
        return {}
    with ExitStack() as stack:
        doors = [stack.enter_context(_door(questions["address"], port)) for port in questions["ports"]]
        questions = {**questions, "ports": [door.getsockname()[1] for door in doors]}
        pool = stack.enter_context(ThreadPoolExecutor(len(hosts)))
        checking = [stack.enter_context(checks.open(host, questions)) for host in hosts]
        answers = [*pool.map(_HostCheck.answer, checking)]
        unreached = {check.host.number: check for check in checking if check.unreached}
        if not may_lack(frozenset(unreached)):
            unreached = {}
        both = [
            (check, reply) for check, reply in zip(checking, answers, strict=True) if check.host.number not in unreached
        ]
        problems = [problem for check, answer in both for problem in check.problems(answer)]
        known = {check.host.number: (check, answer) for check, answer in both if answer}
        problems = problems or one_machine([(check.host, reply) for _, (check, reply) in sorted(known.items())])
        if not problems:
            own = (questions["address"], questions["ports"][0])
            doors_of = {HERE: own} | {
                number: (reply["door"][0], reply["door"][1]) for number, (_, reply) in known.items()
            }
            problems = _apart({number: check for number, (check, _) in known.items()}, doors_of, groups, pool)
    if problems:
        raise SpecError(problems)
    return {check.host.name: check.unreached for check in unreached.values()}


def _door(address: str, port: int) -> socket.socket:
    """Listen at a port (0: one that is free), or where another process has it, reported elsewhere, at a free one."""
    try:
        return socket.create_server((address, port), backlog=1024)
    except OSError:
        return socket.create_server((address, 0), backlog=1024)


class _HostCheck:
    """A connection to a host's `remote_check`."""

    def __init__(self, host: RemoteHost, questions: Questions) -> None:
        self.host, self.questions = host, questions
        self.output: list[str] = []  # what else it printed
        self.broken: Problem | None = None
        self.unreached = ""  # why there is no way to the host, or from it to this one
        self._late = self._entered = False
        command = (
            host.python,
            "-m",
            "rlctl.processes.remote_check",
            json.dumps({**questions, "files": dict(host.files)}),
        )
        script = f"echo {_ENTERED}\n" + remote_script({"PYTHONPATH": host.python_path, "PYTHONSAFEPATH": "1"}, command)
        try:
            self._process = subprocess.Popen(
                host.shell, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                errors="replace", start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise SpecError(
                [Problem("cluster.remote_shell", f"cannot be started: {error.strerror}", "", host.shell[0])]
            ) from None
        self._write(script)

    def __enter__(self) -> _HostCheck:
        return self

    def __exit__(self, *_: object) -> None:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(OSError):
            process.stdin.close()
        try:
            process.wait(_ENDS_S)
        except subprocess.TimeoutExpired:
            self.kill()
            process.wait()
        process.stdout.close()

    def answer(self) -> HostReply | None:
        reply: HostReply | None = self._hear()
        if reply is None:
            self.broken, reason = self._silent(), self._reason()
            self.unreached = "" if self._entered else reason
        elif reply["dial"]:
            self.unreached = f"it cannot reach this host: {reply['dial']}"
        return reply

    def cannot_reach(self, peers: Sequence[tuple[str, str, int]]) -> list[tuple[str, str]]:
        """Return which of these hosts (name, address, port) this one cannot reach, and why."""
        self._write(json.dumps({"peers": peers}) + "\n")
        reply = self._hear()
        if reply is None:
            self.broken = self._silent()
            return []
        return [(name, why) for name, why in reply["unreached"]]

    def problems(self, answer: HostReply | None) -> list[Problem]:
        if answer is None:
            return [self.broken] if self.broken else []
        found = problem_of(self.host, answer, self.questions["address"])
        return [found] if found else []

    def _hear(self) -> Any:
        """Return the next message; None where none comes in time."""
        assert self._process.stdout is not None
        timer = threading.Timer(PROBE_TIMEOUT_S, self._be_late)
        timer.start()
        try:
            for line in self._process.stdout:
                if line.startswith(MARK):
                    return json.loads(line.removeprefix(MARK))
                self._entered = self._entered or line.strip() == _ENTERED
                self.output += [line.strip()] if line.strip() not in ("", _ENTERED) else []
        finally:
            timer.cancel()
        return None

    def _reason(self) -> str:
        if self._late:
            return f"no answer within {PROBE_TIMEOUT_S:g} s"
        return f"exit code {self._process.wait()}: {self.output[-1] if self.output else 'no output'}"

    def _silent(self) -> Problem:
        return _unusable(self.host, self._reason(), "" if self._late else self.host.python)

    def _be_late(self) -> None:
        self._late = True
        self.kill()

    @property
    def is_open(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        if self.is_open:
            signal_group(self._process.pid, signal.SIGKILL)

    def _write(self, text: str) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended: nothing more will be heard
            self._process.stdin.write(text)
            self._process.stdin.flush()


def problem_of(host: RemoteHost, answer: HostReply, address: str, *, now: float | None = None) -> Problem | None:
    """Return what keeps a host that has answered from its part."""
    name, key = host.name, "cluster.hostfile"
    if answer["version"] != __version__:
        return _unusable(host, f"rlctl {answer['version']} is there, and {__version__} here", "")
    if answer["missing"]:
        hint = "all hosts need the same folders under the same names: a shared file system"
        return Problem(key, f"host {name} has no folder {answer['missing'][0]}", hint, name)
    if answer["unshared"]:
        message = (
            f"{answer['unshared'][0]} of host {name} is another folder than this host's: a file made here is not there"
        )
        return Problem(key, message, "name a folder on a file system that all hosts share, such as with run.dir", name)
    if answer["read_only"]:
        message = f"host {name} cannot write to {answer['read_only'][0]}"
        return Problem(key, message, "its ranks write there: mount it for writing, and as the same user", name)
    if answer["different"]:
        message = f"{answer['different'][0]} is not on host {name}, or of another size"
        return Problem(key, message, "all hosts must read the same model: copy it anew, or share its folder", name)
    if answer["changed"]:
        message = f"{answer['changed'][0]} is not on host {name}, or another file than here"
        return Problem(key, message, "all hosts must run the same functions: copy it anew, or share its folder", name)
    if answer["dial"]:
        hint = "write the address at which it finds this host as cluster.address, and open its ports to it"
        return Problem("cluster.address", f"{name} cannot reach it: {answer['dial']}", hint, f'"{address}"')
    if answer["gpus"] is not None and max(host.devices, default=-1) >= answer["gpus"]:
        hint = "name GPUs that every node of the role has, or use other hosts"
        message = f"host {name} has {answer['gpus']} GPUs, and number {max(host.devices)} is asked for"
        return Problem(key, message, hint, name)
    if abs(apart_s := answer["time"] - (time.time() if now is None else now)) > CLOCKS_APART_S:
        way = "ahead of" if apart_s > 0 else "behind"
        hint = "have its clock set (chrony, ntpd): what hosts write into shared folders is compared by time"
        message = f"the clock of host {name} is {abs(apart_s):,.0f} s {way} this host's"
        return Problem(key, message, hint, name)
    return None


def one_machine(answers: Sequence[tuple[RemoteHost, HostReply]]) -> list[Problem]:
    """Hosts that are one machine under two names, or the one where this process runs."""
    seen, problems = {this_machine(): "the host where rlctl runs, the first line of the file"}, []
    for host, answer in answers:
        machine = answer["machine"]
        if machine and machine in seen:
            hint = "give each machine one line, and start rlctl on the first of them"
            problems.append(Problem("cluster.hostfile", f"host {host.name} is {seen[machine]}", hint, host.name))
        seen.setdefault(machine, f"the same machine as {host.name}")
    return problems


def _apart(
    checking: Mapping[int, _HostCheck],
    doors: Mapping[int, tuple[str, int]],
    groups: Sequence[ReachabilityGroup],
    pool: ThreadPoolExecutor,
) -> list[Problem]:
    """Return the hosts of a group that cannot reach one another. Each tries all its peers, this one too."""
    whose = {(one, other): group.what for group in groups for one in group.hosts for other in group.hosts - {one}}
    names = {number: check.host.name for number, check in checking.items()} | {HERE: "the driver's host"}
    by_name = {name: number for number, name in names.items()}

    def peers(one: int) -> list[tuple[str, str, int]]:
        return [(names[other], *doors[other]) for (first, other) in whose if first == one and other in doors]

    asking = {
        number: pool.submit(check.cannot_reach, peers(number)) for number, check in checking.items() if peers(number)
    }
    failed = {HERE: unreached(peers(HERE))} | {number: waiting.result() for number, waiting in asking.items()}
    problems = [check.broken for check in checking.values() if check.broken]
    for one, reasons in sorted(failed.items()):
        for name, why in reasons:
            message = f"{names[one]} cannot reach {name} at {why}; ranks of {whose[one, by_name[name]]} on both connect"
            hint = "open all ports between them: a firewall, or a missing route"
            problems.append(Problem("cluster.hostfile", message, hint, names[one] if one != HERE else name))
    return problems


def _unusable(host: RemoteHost, reason: str, python: str) -> Problem:
    missing = f"; {python} must exist there, with rlctl's folder, as on this host" if python else ""
    hint = f"try it by hand: echo hostname | {shlex.join(host.shell)}{missing}"
    return Problem("cluster.hostfile", f"host {host.name} cannot be used: {reason}", hint, host.name)


def interface_of(env: Mapping[str, str]) -> str:
    """The interface that a person has named for NCCL and gloo; empty: none, or several."""
    names = [env.get(name, "").removeprefix("=") for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")]
    return next((name for name in names if name and not set(name) & set("^,")), "")


@contextmanager
def marked(folders: Sequence[str]) -> Iterator[list[str]]:
    """A new empty file in each folder, by which other hosts see that theirs is the same one; none where none can be
    made, which others report."""
    files: list[str] = []
    try:
        for folder in dict.fromkeys(folders):
            with suppress(OSError):
                number, path = tempfile.mkstemp(prefix=".rlctl-", dir=folder)
                os.close(number)
                files.append(path)
        yield files
    finally:
        for path in files:
            os.unlink(path)
