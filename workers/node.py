"""Supervise processes for a driver on another host, and end them with the connection to it.

`python -m workers.node COMMAND…` supervises a launcher. Standard input is connected to the driver and carries no data:
when it closes (the driver ended or the connection broke), every process that COMMAND started on this host is killed.

`python -m workers.node` supervises ranks that each have a process of their own. Standard input and output are then
JSON, an object per line, and when the input closes every rank is ended:

    in    {"start": KEY, "command": […], "env": {…}, "log": PATH}     {"kill": KEY}
    out   {"ready": true}     {"ended": KEY, "code": N}, negative after a signal

KEY marks a rank's processes in their environment (RLCTL_PROCESS), so that `kill` also ends those that an earlier
supervisor has left.

What all ranks import the supervisor imports once, and forks them: that is most of what a start costs. It never imports
torch, starts no thread and opens no socket before. A rank has a session, a log and an environment of its own all the
same; only /proc shows the supervisor's command line and environment for it, without its mark. A rank of another
interpreter, or with variables that libraries read when they are loaded, is started instead.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, Protocol

from workers.watchdog import kill_marked, set_process_name, signal_group

GRACE_S = 3.0
PREFIX = "rlctl-node: "  # before each line to the driver: a login shell may print lines of its own
_KILL_TIMEOUT_S = 10.0
_LOOK_S = 0.05
_RANK = ("-m", "workers.main")
_IMPORTED = (_RANK[1], "workers.roles.engine_rank")
_PLACE = ("RLCTL_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_")  # how variables begin that only ranks read
_IDLE_S = 60.0  # with no rank left: the connection to a driver that is gone may stay open


def supervise_launcher(command: Sequence[str]) -> int:
    """Run `command` until it or standard input ends; return its exit code, 128 + N after signal N."""
    mark = f"RLCTL_PARENT_PID={os.getpid()}"  # ranks exit when this process ends, as with a driver on their host
    hung_up = threading.Event()
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, lambda *_: hung_up.set())
    child = subprocess.Popen(
        command,
        env={**os.environ, "RLCTL_PARENT_PID": str(os.getpid())},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    threading.Thread(target=_wait_for_end_of_input, args=(hung_up,), daemon=True).start()
    while child.poll() is None and not hung_up.wait(0.1):
        pass
    if child.poll() is None:
        _end(child)
    kill_marked(mark, _KILL_TIMEOUT_S)
    code = child.wait()
    return code if code >= 0 else 128 - code


def _wait_for_end_of_input(hung_up: threading.Event) -> None:
    while os.read(0, 4096):
        pass
    hung_up.set()


def _end(child: subprocess.Popen[bytes]) -> None:
    for number, grace_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, _KILL_TIMEOUT_S)):
        os.killpg(child.pid, number)
        try:
            child.wait(grace_s)
            return
        except subprocess.TimeoutExpired:
            continue


class Process(Protocol):
    """The part of `Popen` that a supervisor needs."""

    pid: int

    def poll(self) -> int | None: ...


class Forked:
    """A rank that was forked."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if ended else None
        return self._code


class BecomesRank(BaseException):
    """In a fork: leave the supervisor behind and be a rank, with these arguments for `workers.main`."""

    def __init__(self, arguments: Sequence[str]) -> None:
        super().__init__(*arguments)
        self.arguments = arguments


class Supervisor:
    """Ranks, by key, and the connection to the driver."""

    def __init__(self) -> None:
        self._ranks: dict[str, Process] = {}
        self._hung_up = False
        self._used = time.monotonic()

    def run(self) -> None:
        """Serve the driver until the connection ends."""
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, self._hang_up)
        self._send({"ready": True})
        for message in self._messages():
            if "start" in message:
                self._start(message)
            elif "kill" in message:
                self._kill(message["kill"])
        self._end_all()

    def _messages(self) -> Iterator[Mapping[str, Any]]:
        """Yield the driver's messages; in between, report which ranks have ended."""
        read = b""
        while not self._hung_up:
            if select.select([0], [], [], _LOOK_S)[0]:
                more = os.read(0, 65536)
                if not more:
                    return
                *lines, read = (read + more).split(b"\n")
                yield from (json.loads(line) for line in lines if line.strip())
            self._report()

    def _start(self, request: Mapping[str, Any]) -> None:
        marks = {"RLCTL_PROCESS": request["start"], "RLCTL_PARENT_PID": str(os.getpid())}
        command, env = request["command"], {**request["env"], **marks}
        if _may_fork(command, env):
            self._ranks[request["start"]] = _fork(command[3:], env, request["log"])
            return
        with open(request["log"], "ab") as log_file:
            self._ranks[request["start"]] = subprocess.Popen(
                command,
                env={**os.environ, **env},
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _kill(self, key: str) -> None:
        if key in self._ranks:
            signal_group(self._ranks[key].pid, signal.SIGKILL)  # a fork, or where no mark can be read
        kill_marked(f"RLCTL_PROCESS={key}", _KILL_TIMEOUT_S)
        self._report()

    def _report(self) -> None:
        for key, rank in [*self._ranks.items()]:
            if (code := rank.poll()) is not None:
                del self._ranks[key]
                self._used = time.monotonic()
                self._send({"ended": key, "code": code})
        if not self._ranks and time.monotonic() - self._used > _IDLE_S:
            self._hung_up = True

    def _end_all(self) -> None:
        for number, grace_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, _KILL_TIMEOUT_S)):
            for rank in self._ranks.values():
                signal_group(rank.pid, number)
            deadline = time.monotonic() + grace_s
            while self._ranks and time.monotonic() < deadline:
                time.sleep(_LOOK_S)
                self._ranks = {key: rank for key, rank in self._ranks.items() if rank.poll() is None}
        kill_marked(f"RLCTL_PARENT_PID={os.getpid()}", _KILL_TIMEOUT_S)

    def _send(self, message: Mapping[str, Any]) -> None:
        try:
            print(PREFIX + json.dumps(message), flush=True)
        except OSError:
            self._hung_up = True

    def _hang_up(self, *_: object) -> None:
        self._hung_up = True


def _may_fork(command: Sequence[str], env: Mapping[str, str]) -> bool:
    """Return whether a fork of this process, with what ranks import, is what the command would be."""
    if command[0] != sys.orig_argv[0] or tuple(command[1:3]) != _RANK or threading.active_count() > 1:
        return False
    if not all(name.startswith(_PLACE) for name in env):
        return False
    try:
        for module in _IMPORTED:
            import_module(module)
    except Exception:  # a rank that is started writes what is wrong into its log
        return False
    return True


def _fork(arguments: Sequence[str], env: Mapping[str, str], log: str) -> Forked:
    """Fork a rank. Raise BecomesRank in the fork."""
    gc.freeze()  # what is there now is never looked at again, and stays shared
    pid = os.fork()
    if pid:
        return Forked(pid)
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    written = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    for new, old in ((os.open(os.devnull, os.O_RDONLY), 0), (written, 1), (written, 2)):
        os.dup2(new, old)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.environ.update(env)
    raise BecomesRank(arguments)


def main(command: Sequence[str]) -> int:
    set_process_name("rlctl-node")
    if command:
        return supervise_launcher(command)
    try:
        Supervisor().run()
    except BecomesRank as rank:
        arguments = rank.arguments
    else:
        return 0
    code: int = import_module(_RANK[1]).main(arguments)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
