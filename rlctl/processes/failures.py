"""Signs of failures, and which of them is the root cause. When one rank fails, connections break on its peers: their
errors are secondary failures, and wait for the root cause. Typed causes and exit codes decide; messages are for people.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from rlctl.processes.launch import Started, describe_exit, tail
from rlctl.processes.node_connection import RemoteProcess
from specs.errors import Cause
from specs.wire.bodies import ErrorBody
from specs.wire.messages import Verb

ROOT_CAUSE_GRACE_S = 2.0  # how long a failure that may be secondary waits for its root cause
# The same where a launcher stands between: it ends the other ranks before it reports which one failed.
LAUNCHER_GRACE_S = 20.0

# Ends that follow from others: a process aborts itself when its peer is gone, a launcher ends the rest.
_FOLLOW_UPS = (-signal.SIGABRT, -signal.SIGTERM)
_ROOT_CAUSE = re.compile(r"Root Cause.*?^\s*rank\s*:\s*(\d+).*?exitcode\s*:\s*(-?\d+)", re.DOTALL | re.MULTILINE)

# Verbs in which ranks of several roles wait for each other: the end of one breaks the connections of the others.
JOINED_VERBS = frozenset({Verb.EXPORT_BUCKET, Verb.EXPORT_END, Verb.IMPORT_BEGIN, Verb.IMPORT_BUCKET, Verb.IMPORT_END})


class Severity(IntEnum):
    """The rank with the lowest is blamed."""

    ROOT = 0  # no failure elsewhere explains it
    # An exit code, SIGTERM, or a process that aborted itself: it may follow from another rank's end, or from an error
    # that is still on its way.
    EXIT = 1
    SECONDARY = 2  # a peer was gone or late


@dataclass(frozen=True)
class Evidence:
    """One sign of a failure."""

    role: str
    rank: int
    cause: Cause
    message: str  # for people
    weight: Severity = Severity.ROOT
    kind: str = ""  # class name of the error that a rank raised
    hint: str = ""
    log_name: str = ""  # another log than the rank's own
    needs_log: bool = True  # the message does not say it all: show the last lines of the log
    host_lost: bool = False  # with all that was there
    in_sync: int = 0  # number of the joined verb that it ended: the failure of a rank elsewhere explains it

    @property
    def permanent(self) -> bool:
        """Return whether the rank is gone for good, not only this verb."""
        return self.cause in (Cause.ENDED, Cause.SILENT)


class Blame:
    """Collects evidence until the root cause is known, or none better came in time."""

    def __init__(self) -> None:
        self._evidence: list[tuple[Evidence, float]] = []  # and when it is blamed if none better came

    def add(self, evidence: Evidence, grace_s: float = ROOT_CAUSE_GRACE_S) -> None:
        """Note evidence; without better one it is blamed after `grace_s`."""
        self._evidence.append((evidence, time.monotonic() + grace_s))

    @property
    def pending(self) -> bool:
        return bool(self._evidence)

    def take_explained(self) -> list[Evidence]:
        """Return and forget the secondary failures of a sync: a rank that has failed explains them."""
        explained = [evidence for evidence, _ in self._evidence if evidence.in_sync]
        self._keep(lambda evidence: not evidence.in_sync)
        return explained

    def forget_secondary(self, role: str, rank: int) -> None:
        """Forget the secondary failures of a rank whose own end, or that of a part of it, explains them."""
        self._keep(lambda it: (it.role, it.rank) != (role, rank) or it.weight is not Severity.SECONDARY)

    def root_cause(self) -> Evidence | None:
        """Return the evidence to blame once that is settled. What concerned one verb only is then forgotten."""
        if not self._evidence:
            return None
        first, _ = min(self._evidence, key=lambda one: one[0].weight)
        due = min(until for evidence, until in self._evidence if evidence.weight is first.weight)
        if first.weight > Severity.ROOT and time.monotonic() < due:
            return None
        self._keep(lambda evidence: evidence.permanent)
        return first

    def _keep(self, stays: Callable[[Evidence], bool]) -> None:
        self._evidence = [(evidence, until) for evidence, until in self._evidence if stays(evidence)]


def from_error(role: str, rank: int, error: ErrorBody, *, alone: bool, joined_call: int = 0) -> Evidence:
    """Return evidence of a rank's ERROR message. A rank that computes `alone`, on one node, has no peer to blame, but
    in a joined verb, of number `joined_call`."""
    from_peer = error.cause in (Cause.PEER_GONE, Cause.PEER_LATE)
    is_secondary = from_peer and (joined_call > 0 or not alone)
    return Evidence(
        role,
        rank,
        error.cause,
        error.message if error.known else f"{error.kind}: {error.message}",
        weight=Severity.SECONDARY if is_secondary else Severity.ROOT,
        kind=error.kind,
        hint=error.hint,
        needs_log=from_peer or not error.known,
        in_sync=joined_call if is_secondary else 0,
    )


def from_end(started: Started, code: int) -> Evidence:
    """Return evidence of a process that ended: a rank, or a launcher, which may report the rank that failed first. A
    signal is a root cause, unless it is one that follows from others; an exit code perhaps not."""
    role, rank, has_launcher = started.role, started.ranks[0], started.launcher != "python"
    if isinstance(started.process, RemoteProcess) and not started.process.has_reported:
        host, log_name = started.host or "the supervisor here", started.process.node.log_path.name
        message = f"the connection to {host} ended ({describe_exit(code)}): every {role} there has failed"
        if (problem := started.process.node.problem) is not None:
            message = f"{host} cannot take part: {problem.message} ({problem.hint})"
        lost = started.process.node.shell.lost and problem is None
        return Evidence(role, rank, Cause.ENDED, message, log_name=log_name, host_lost=lost)
    if has_launcher and (reported := root_cause(started.log_path)):
        return _ended(role, *reported, Severity.ROOT)
    if started.is_part:
        message = f"its part on {started.host}: {describe_exit(code)}"
        return Evidence(role, rank, Cause.ENDED, message, Severity.ROOT, log_name=started.log_path.name)
    is_root = code < 0 and (has_launcher or code not in _FOLLOW_UPS)
    weight = Severity.ROOT if is_root else Severity.EXIT
    if has_launcher:
        message = f"{started.launcher}: {describe_exit(code)}"
        return Evidence(role, rank, Cause.ENDED, message, weight, log_name=started.log_path.name)
    return _ended(role, rank, code, weight)


def _ended(role: str, rank: int, code: int, weight: Severity) -> Evidence:
    hint = "SIGKILL from outside often means that memory ran out" if code == -signal.SIGKILL else ""
    return Evidence(role, rank, Cause.ENDED, describe_exit(code), weight, hint=hint)


def root_cause(log_path: Path) -> tuple[int, int] | None:
    """Return the rank that torchrun names as the root cause at its end, and its exit code (text of torch 2.13.0)."""
    found = _ROOT_CAUSE.search(tail(log_path, lines=200))
    return (int(found[1]), int(found[2])) if found else None
