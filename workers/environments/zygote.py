"""The process that imports the user's files once and forks the others: `python -m workers.environments.zygote`.

Its arguments are its parent's process and the descriptor of a socket of packets; its stdin holds what to load, as JSON.
Its first packet is `{"ready": true}` or `{"error": ..., "hint": ...}`. Each packet that it gets, `{"fork": n}` with an
end of a socket, forks a process that answers there, and `{"fork": n, "pid": p}` or `{"fork": n, "failed": text}` comes
back; `{"ended": p, "status": s}` follows when that ends. What ended processes leave behind is killed. At its end, also
where its parent was killed, the folder of their files goes.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import select
import signal
import socket
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

from specs.errors import RewardError
from workers.environments.environment_child import Pipe, Session, children
from workers.environments.harness import remove_folder
from workers.environments.loaded import Loaded, load
from workers.grading.child import become_expendable, hide_streams, one_line
from workers.grading.reward_sources import keep_sources
from workers.watchdog import die_with_parent, signal_process

PR_SET_CHILD_SUBREAPER = 36
PACKET_BYTES = 1 << 16
ERROR_CHARACTERS = 4000


def main() -> None:
    become_expendable()
    control = socket.socket(fileno=int(sys.argv[2]))
    control.set_inheritable(False)
    hello = json.loads(sys.stdin.buffer.read())
    hide_streams()
    keep_sources(hello["sources"])
    loaded = _load(control, hello["setup"])
    if loaded is None:
        return
    gc.collect()
    gc.freeze()  # pages of what is there now stay shared with every process that is forked
    zygote = Zygote(control)
    _send(control, {"ready": True})
    end = zygote.serve()
    if end is not None:  # in a process that was forked
        Session(loaded, hello["setup"]["base"], Pipe(end), hello["memory_MiB"]).serve()
    elif hello["folder"]:
        remove_folder(Path(hello["folder"]))


def _load(control: socket.socket, setup: dict[str, Any]) -> Loaded | None:
    """Load the user's files; None if that is impossible, after the error was sent to the parent."""
    try:
        loaded = load(**setup)
        if loaded.servers:
            import mcp  # noqa: F401  # once, not in each process
    except ModuleNotFoundError as error:
        hint = f"install mcp for {sys.executable}: MCP servers need it"
        _send(control, {"error": f"{error}", "hint": hint})
    except RewardError as error:
        if error.__cause__ is not None:  # the user's code raised
            traceback.print_exception(error.__cause__)
        _send(control, {"error": error.message[:ERROR_CHARACTERS], "hint": error.hint})
    except Exception as error:  # whatever is wrong with the user's code, its parent hears of it
        traceback.print_exc()
        _send(control, {"error": one_line(error), "hint": "the traceback is in the log of environments"})
    else:
        return loaded
    return None


class Zygote:
    """Forks on request. It stays single-threaded and runs none of the user's code."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._known: set[int] = set()
        self._pid = os.getpid()
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # it inherits what ended processes leave
        self._wakes, self._wake = socket.socketpair()
        self._wake.setblocking(False)
        self._stopped = False
        signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._stop)
        die_with_parent(signal.SIGTERM)

    def serve(self) -> socket.socket | None:
        """Return the end of a socket in each process that was forked; None in this one, when the parent is done."""
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(self._wakes, select.POLLIN)
        while not self._stopped:
            ready = {descriptor for descriptor, _ in poll.poll()}
            if self._wakes.fileno() in ready:
                self._wakes.recv(PACKET_BYTES)
                self._reap()
            if self._control.fileno() in ready and (end := self._take_request()):
                return end
        self._end_all()
        return None

    def _stop(self, *_: object) -> None:
        self._stopped = True

    def _take_request(self) -> socket.socket | None:
        """Fork; return the socket in the new process, None in this one."""
        packet, descriptors = b"", list[int]()
        with suppress(ConnectionResetError):  # it closed its end before it had read everything
            packet, descriptors, _, _ = socket.recv_fds(self._control, PACKET_BYTES, 1)
        if not packet:
            self._stopped = True
            return None
        reply = json.loads(packet)
        end = socket.socket(fileno=descriptors[0])
        try:
            pid = os.fork()
        except OSError as error:
            _send(self._control, {**reply, "failed": str(error)})
        else:
            if not pid:
                self._become_child()
                return end
            self._known.add(pid)
            _send(self._control, {**reply, "pid": pid})
        end.close()
        return None

    def _become_child(self) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for each in (self._control, self._wakes, self._wake):
            each.close()
        os.setsid()
        die_with_parent()
        if os.getppid() != self._pid:
            os._exit(1)  # it died before the signal was asked for
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # what an episode starts stays below its process

    def _reap(self) -> None:
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = ended
                if pid in self._known:
                    self._known.remove(pid)
                    _send(self._control, {"ended": pid, "status": os.waitstatus_to_exitcode(status)})
        for pid in children() - self._known:
            signal_process(pid, signal.SIGKILL)

    def _end_all(self) -> None:
        """Kill everything below, however deep: what loses its parent comes up here."""
        with suppress(ChildProcessError):
            while True:
                for pid in children() | self._known:
                    signal_process(pid, signal.SIGKILL)
                self._known.discard(os.waitpid(-1, 0)[0])


def _send(control: socket.socket, message: dict[str, Any]) -> None:
    with suppress(BrokenPipeError, ConnectionResetError):  # the parent is gone: the next look at the socket says so
        control.send(json.dumps(message).encode())


if __name__ == "__main__":
    main()
