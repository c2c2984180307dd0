"""Handle, in the parent, the process that forks and each that it forked; all of it in one event loop."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Literal

from specs.errors import RewardError
from workers.grading.grader_process import KILL_WAIT_S, OUTPUT_WAIT_S, encode, how_it_ended, isolated_variables
from workers.grading.output_log import log_output
from workers.watchdog import signal_group, signal_process

LINE_BYTES = 16 << 20  # max size of a message
PACKET_BYTES = 1 << 16
END_WAIT_S = 1.0  # between the end of a process and that of its socket, which a process that it forked may hold


class EnvironmentLost(Exception):
    """The episode cannot continue: its process took too long, ended, or its code raised outside of a tool."""

    def __init__(self, cause: Literal["timeout", "crash"], text: str, hint: str = "") -> None:
        super().__init__(text)
        self.cause, self.text, self.hint = cause, text, hint


class ZygoteHandle:
    """The process that has imported the user's files and forks. It dies with the thread that made it."""

    def __init__(self, hello: bytes, log_path: Path, env: Mapping[str, str]) -> None:
        self._loop = asyncio.get_running_loop()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        output, self._output = log_output(log_path)
        with theirs, TemporaryFile() as stdin, open(output, "wb") as log:
            stdin.write(hello)
            stdin.seek(0)
            arguments = (str(os.getpid()), str(theirs.fileno()))  # of `zygote.py`
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-X", "faulthandler", "-m", "workers.environments.zygote", *arguments],
                stdin=stdin,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                env=isolated_variables(env),
                start_new_session=True,
            )
        self._control.setblocking(False)
        self._loop.add_reader(self._control, self._receive)
        self.ready: asyncio.Future[None] = self._loop.create_future()
        self.gone = False
        self._numbers = itertools.count()
        self._forks: dict[int, EnvironmentProcess] = {}  # by request
        self._processes: dict[int, EnvironmentProcess] = {}  # by their numbers

    def fork(self, process: EnvironmentProcess, end: socket.socket) -> None:
        """Have a process forked that answers at the other end of its socket, `end`."""
        number = next(self._numbers)
        self._forks[number] = process
        try:
            socket.send_fds(self._control, [encode({"fork": number})], [end.fileno()])
        except OSError:  # it has ended just now
            _fail(process.forked, EnvironmentLost("crash", "the process that forks ended"))

    async def end(self) -> None:
        """End it, all processes that it forked and what they started."""
        if not self.ready.done():  # it imports the user's files, and sees nothing else
            self._process.kill()
        self._leave("the pool was closed")
        await asyncio.to_thread(self._wait)

    def _receive(self) -> None:
        try:
            packet = self._control.recv(PACKET_BYTES)
        except BlockingIOError:
            return
        except OSError:
            packet = b""
        message = json.loads(packet) if packet else {}
        if "pid" in message:
            process = self._processes[message["pid"]] = self._forks.pop(message["fork"])
            process.begin(message["pid"])
        elif "ended" in message:
            self._processes.pop(message["ended"]).end(how_it_ended(message["status"]))
        elif "failed" in message:
            _fail(self._forks.pop(message["fork"]).forked, EnvironmentLost("crash", f"no process: {message['failed']}"))
        elif "error" in message:
            _fail(self.ready, RewardError(message["error"], hint=message["hint"]))
        elif message:
            self.ready.set_result(None)
        else:
            self._process.kill()
            self._wait()
            self._leave(how_it_ended(self._process.poll()))

    def _leave(self, text: str) -> None:
        if self.gone:
            return
        self.gone = True
        self._loop.remove_reader(self._control)
        self._control.close()
        for waiting in (self.ready, *(process.forked for process in self._forks.values())):
            _fail(waiting, EnvironmentLost("crash", text))
        for process in self._processes.values():
            process.kill()
            process.end(text)

    def _wait(self) -> None:
        try:
            self._process.wait(KILL_WAIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._output.join(OUTPUT_WAIT_S)


class EnvironmentProcess:
    """A process that serves one episode at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._loop = asyncio.get_running_loop()
        self._pid = 0
        self.forked: asyncio.Future[None] = self._loop.create_future()
        self._ended: asyncio.Future[str] = self._loop.create_future()
        self.dead, self.busy = False, False
        self._number = 0  # of the request that it answers
        self.description: dict[str, Any] = {}

    @classmethod
    async def fork(cls, zygote: ZygoteHandle) -> EnvironmentProcess:
        """Return a process when its tools are there. Raises EnvironmentLost."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = cls(*await asyncio.open_unix_connection(sock=ours, limit=LINE_BYTES))
            zygote.fork(process, theirs)
        with process.killed_on_error():
            await process.forked
            process.description = await process.receive()
            if "error" in process.description:
                raise EnvironmentLost("crash", process.description["error"], process.description["hint"])
        return process

    def request(self, message: Mapping[str, Any]) -> None:
        """Send a request. Raises EnvironmentLost."""
        self._number += 1
        self.send({"n": self._number, **message})

    def send(self, message: dict[str, Any]) -> None:
        if self.dead:
            raise EnvironmentLost("crash", "the process is gone")
        self._writer.write(encode(message))

    async def receive(self) -> dict[str, Any]:
        """Return its next message about the request. Raises EnvironmentLost."""
        try:
            line = await self._reader.readline()
            message = json.loads(line) if line.endswith(b"\n") else None
        except ValueError:
            raise EnvironmentLost("crash", f"it answered no JSON, or more than {LINE_BYTES} bytes") from None
        except OSError:
            message = None
        if message is None:
            raise EnvironmentLost("crash", await self._how_it_ended())
        if not isinstance(message, dict) or message.pop("n", None) != self._number:
            raise EnvironmentLost("crash", "its code wrote to the socket that answers")
        return message

    @contextmanager
    def killed_on_error(self) -> Iterator[None]:
        """Kill the process when what is inside raises or is cancelled: nobody knows what it does then."""
        self.busy = True
        try:
            yield
        except BaseException:
            self.kill()
            raise
        self.busy = False

    def kill(self) -> None:
        """Kill the process; what it started is killed after it, by the one that forked it."""
        self.dead = True
        if self._pid and not self._ended.done():
            kill(self._pid)
        self._writer.transport.abort()

    def begin(self, pid: int) -> None:
        """Note that it was forked."""
        self._pid = pid
        if self.dead:
            kill(pid)
        elif not self.forked.done():  # else whoever waited was cancelled just now, and kills it
            self.forked.set_result(None)

    def end(self, text: str) -> None:
        """Note that it ended, and how."""
        self.dead = True
        self._ended.set_result(text)
        self._loop.call_later(END_WAIT_S, self._writer.transport.abort)

    async def _how_it_ended(self) -> str:
        await asyncio.wait({self._ended}, timeout=END_WAIT_S)
        return self._ended.result() if self._ended.done() else how_it_ended(None)


def kill(pid: int) -> None:
    """SIGKILL a process and its group."""
    signal_process(pid, signal.SIGKILL)
    signal_group(pid, signal.SIGKILL)


def _fail(waiting: asyncio.Future[Any], error: Exception) -> None:
    if not waiting.done():
        waiting.set_exception(error)
        waiting.exception()  # it counts as seen: nobody may be waiting
