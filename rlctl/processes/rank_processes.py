"""Ranks below a launcher on this host: which has ended, seen at once and in order.

The launcher says so only when it has ended all others, perhaps seconds after those have told that they lost a peer.
"""

from __future__ import annotations

import os
from pathlib import Path

import psutil

from rlctl.processes.rank_states import Place


class RankProcesses:
    """Asks only for processes that were seen to descend from their launcher: a number may mean another process
    elsewhere, or later."""

    def __init__(self) -> None:
        self._running: dict[Place, psutil.Process] = {}
        self._known: set[Place] = set()

    def __contains__(self, place: Place) -> bool:
        """Whether the end of this rank is, or was, seen here."""
        return place in self._known

    def watch(self, place: Place, pid: int, launcher_pid: int) -> None:
        """Of a rank that says that it is process `pid`. Does nothing where that is no descendant of its launcher."""
        try:
            process = psutil.Process(pid)
            if launcher_pid in {parent.pid for parent in process.parents()}:
                self._running[place] = process
                self._known.add(place)
        except psutil.Error:
            return

    def newly_ended(self) -> list[tuple[Place, int | None]]:
        """(role and rank, exit code) of each, once. The code is negative for a signal, and None where the launcher has
        taken it already."""
        ended = [(place, process) for place, process in self._running.items() if not _runs(process)]
        for place, _ in ended:
            del self._running[place]
        return [(place, _exit_code(process)) for place, process in ended]


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _exit_code(process: psutil.Process) -> int | None:
    """Exit code of a process that nobody has waited for yet, from proc_pid_stat(5)."""
    try:
        if not process.is_running():
            return None
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        return os.waitstatus_to_exitcode(int(fields[_EXIT_CODE - _STATE])) if fields[0] == "Z" else None
    except (psutil.Error, OSError, ValueError, IndexError):
        return None


_STATE, _EXIT_CODE = 3, 52  # numbers of fields, which the manual counts from 1
