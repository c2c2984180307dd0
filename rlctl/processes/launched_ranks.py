"""Ranks below a launcher: which of them ended first, as this host sees it, and as torchrun reports it at its end."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from rlctl.processes.launch import Place, tail

_STATE, _EXIT_CODE = 3, 52  # numbers of fields in proc_pid_stat(5), which counts from 1
FOLLOW_UPS = (-signal.SIGABRT, -signal.SIGTERM)
"""Ends that follow from others: a process aborts itself when its peer is gone, a launcher ends the rest."""
_ROOT_CAUSE = re.compile(r"Root Cause.*?^\s*rank\s*:\s*(\d+).*?exitcode\s*:\s*(-?\d+)", re.DOTALL | re.MULTILINE)


class LaunchedRanks:
    """Sees ranks end that a launcher on this host started. It says so itself only when it has ended all others.

    Only processes that descend from their launcher are watched: a number may mean another process elsewhere."""

    def __init__(self) -> None:
        self._running: dict[Place, psutil.Process] = {}
        self._watched: set[Place] = set()
        self._ended: set[str] = set()  # roles of which a rank has ended

    def __contains__(self, place: Place) -> bool:
        """Return whether the end of this rank is, or was, seen here."""
        return place in self._watched

    def watch(self, place: Place, pid: int, launcher_pid: int) -> None:
        """Watch a rank that is process `pid`; do nothing where that is no descendant of its launcher."""
        try:
            process = psutil.Process(pid)
            if launcher_pid in {parent.pid for parent in process.parents()}:
                self._running[place] = process
                self._watched.add(place)
        except psutil.Error:
            return

    def first_ended(self) -> list[FirstEnd]:
        """Return the first rank of each role that has ended, once; later ones follow from it."""
        ended = [(place, process) for place, process in self._running.items() if not _runs(process)]
        codes: dict[str, dict[int, int | None]] = {}
        for place, process in ended:
            del self._running[place]
            if place[0] not in self._ended:
                codes.setdefault(place[0], {})[place[1]] = _exit_code(process)
        self._ended.update(codes)
        return [first_of(role, of_role) for role, of_role in codes.items()]


@dataclass(frozen=True)
class FirstEnd:
    """The rank of a role that ended first. `code`: negative for a signal, None where the launcher has taken it already.
    `others` were seen to have ended at the same time."""

    role: str
    rank: int
    code: int | None
    others: tuple[int, ...] = ()


def first_of(role: str, codes: Mapping[int, int | None]) -> FirstEnd:
    """Return which of ranks that ended together was probably first. Its launcher has taken its code and then ended the
    others with SIGTERM or SIGKILL; a process aborts itself when its peer is gone."""
    order: dict[int | None, int] = {None: 1, -signal.SIGKILL: 2, **dict.fromkeys(FOLLOW_UPS, 4)}
    rank = min(codes, key=lambda rank: order.get(codes[rank], 3 if (codes[rank] or 0) >= 0 else 0))
    return FirstEnd(role, rank, codes[rank], tuple(other for other in codes if other != rank))


def root_cause(log_path: Path) -> tuple[int, int] | None:
    """Return the rank that torchrun names as the root cause at its end, and its exit code (text of torch 2.13.0)."""
    found = _ROOT_CAUSE.search(tail(log_path, lines=200))
    return (int(found[1]), int(found[2])) if found else None


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _exit_code(process: psutil.Process) -> int | None:
    """Return the exit code of a process that nobody has waited for yet."""
    try:
        if not process.is_running():
            return None
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        return os.waitstatus_to_exitcode(int(fields[_EXIT_CODE - _STATE])) if fields[0] == "Z" else None
    except (psutil.Error, OSError, ValueError, IndexError):
        return None
