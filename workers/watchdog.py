"""No process outlives the driver: a rank ends with its parent, and with the driver if that is not its parent."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import threading
import time
from contextlib import suppress
from glob import glob
from pathlib import Path

EXIT_ORPHANED = 75

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_POLL_S = 0.5
_LOOKS = 2  # that must find nothing before nothing is there
_CLEANING_S = 3.0  # time for processes that clean up after the others
_CLEANERS = (b"multiprocessing.resource_tracker", b"workers.environments.zygote")


def die_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel signal this process when the thread that started it ends.

    A parent that died before this call goes unnoticed here: pair it with `watch_process`.
    """
    _prctl(_PR_SET_PDEATHSIG, number)


def set_process_name(name: str) -> None:
    """Name shown by `ps` and `top`; the kernel keeps 15 bytes."""
    buffer = ctypes.create_string_buffer(name.encode()[:15])
    _prctl(_PR_SET_NAME, ctypes.addressof(buffer))


def watch_process(pid: int) -> threading.Thread:
    """End this process (exit code 75) as soon as process `pid` is gone."""
    thread = threading.Thread(target=_wait_then_exit, args=(pid,), name="watchdog", daemon=True)
    thread.start()
    return thread


def pids_marked(variable: str) -> list[int]:
    """Return other processes that were started with `NAME=value` in their environment.

    One that is in the middle of `exec` has none for a moment, and is not seen.
    """
    mark = variable.encode()
    pids = (int(name) for name in glob("[0-9]*", root_dir="/proc"))
    return [pid for pid in pids if pid != os.getpid() and mark in _environ_of(pid).split(b"\0")]


def kill_marked(variable: str, timeout_s: float) -> list[int]:
    """SIGKILL every process that `pids_marked` finds until two looks find none; returns those that did not end.

    A process that ends loses its environment, and with it the mark, before it lets go of files, locks and ports: that
    is waited for too. Resource trackers and zygotes are killed last, after a delay: they remove shared memory
    and folders that others left, and end when those have.
    """
    now = time.monotonic()
    deadline, cleaned = now + timeout_s, now + min(_CLEANING_S, timeout_s)
    looks_left, since = _LOOKS, dict[int, str]()
    while True:
        marked = pids_marked(variable)
        since |= {pid: start for pid in marked if (start := _running_since(pid))}
        left = [pid for pid, start in since.items() if _running_since(pid) == start]
        looks_left = _LOOKS if left else looks_left - 1
        if not looks_left or (left and time.monotonic() > deadline):
            return left
        others = [pid for pid in marked if not any(name in _of_process(pid, "cmdline") for name in _CLEANERS)]
        for pid in marked if time.monotonic() > cleaned else others:
            signal_process(pid, signal.SIGKILL)
        time.sleep(0.02)


def _running_since(pid: int) -> str:
    """Return when a process started, which tells it from a later one of its number; empty when it has ended."""
    state, *more = _of_process(pid, "stat").rpartition(b")")[2].decode().split() or ("X",)
    return "" if state in "ZX" else more[18]


def _environ_of(pid: int) -> bytes:
    return _of_process(pid, "environ")  # empty for a zombie


def _of_process(pid: int, name: str) -> bytes:
    """Return what a file of /proc says of a process; empty when that has ended."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def signal_group(leader: int, number: signal.Signals) -> None:
    """Signal a process group, also after its leader's end: its children may live. One that is gone is left alone."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)


def signal_process(pid: int, number: signal.Signals) -> None:
    """Signal a process. One that is gone is left alone."""
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _wait_then_exit(pid: int) -> None:
    try:
        select.select([os.pidfd_open(pid)], [], [])
    except (OSError, AttributeError):  # it is gone, or the system is old, or a sandbox forbids pidfd_open
        with suppress(ProcessLookupError):
            while True:
                os.kill(pid, 0)
                time.sleep(_POLL_S)
    print(f"process {pid}, which drives this run, is gone: leaving", file=sys.stderr, flush=True)
    os._exit(EXIT_ORPHANED)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, ctypes.c_ulong(value), 0, 0, 0)
