"""Which rank is to blame. When one rank fails, connections break on its peers: their errors are secondary failures, and
they wait for the root cause. Everything is decided by typed causes and exit codes; messages are for people.
"""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass
from enum import IntEnum

from rlctl.processes.launch import Started, describe_exit
from rlctl.processes.torchrun_report import first_failure
from specs.errors import Cause
from specs.wire.error_body import ErrorBody
from specs.wire.messages import Verb

ROOT_CAUSE_GRACE_S = 2.0  # how long a failure that may be secondary waits for its root cause

# Verbs in which ranks of several roles wait for each other: the end of one breaks the connections of the others.
JOINED_VERBS = frozenset({Verb.EXPORT_BUCKET, Verb.EXPORT_END, Verb.IMPORT_BEGIN, Verb.IMPORT_BUCKET, Verb.IMPORT_END})


class Weight(IntEnum):
    """The rank with the lowest is blamed."""

    ROOT = 0  # no failure elsewhere explains it
    EXIT = 1  # an exit code: it may follow from another rank's end, or from an error that is still on its way
    SECONDARY = 2  # a peer was gone or late


@dataclass(frozen=True)
class Evidence:
    """One sign of a failure."""

    role: str
    rank: int
    cause: Cause
    message: str  # for people
    weight: Weight = Weight.ROOT
    kind: str = ""  # class name of the error that a rank raised
    hint: str = ""
    log_name: str = ""  # another log than the rank's own
    needs_log: bool = True  # the message does not say it all: show the last lines of the log

    @property
    def permanent(self) -> bool:
        """The rank is gone for good, not only this verb."""
        return self.cause in (Cause.ENDED, Cause.SILENT)

    @property
    def is_secondary(self) -> bool:
        return self.weight is Weight.SECONDARY


class Blame:
    """Collects evidence until the root cause is known, or none better came in time."""

    def __init__(self) -> None:
        self._evidence: list[Evidence] = []
        self._until = 0.0

    def add(self, evidence: Evidence, grace_s: float = ROOT_CAUSE_GRACE_S) -> None:
        if not self._evidence:
            self._until = time.monotonic() + grace_s
        self._evidence.append(evidence)

    @property
    def pending(self) -> bool:
        return bool(self._evidence)

    def root_cause(self) -> Evidence | None:
        """The evidence to blame, as soon as that is settled. What concerned one verb only is then forgotten."""
        if not self._evidence:
            return None
        first = min(self._evidence, key=lambda evidence: evidence.weight)
        if first.weight > Weight.ROOT and time.monotonic() < self._until:
            return None
        self._evidence = [evidence for evidence in self._evidence if evidence.permanent]
        return first


class HeldErrors:
    """Errors of calls that may follow from the loss of a rank that nobody has noticed yet."""

    def __init__(self) -> None:
        self._held: list[tuple[Evidence, int, float]] = []

    def hold(self, error: Evidence, call: int) -> None:
        """An error in call number `call`."""
        self._held.append((error, call, time.monotonic() + ROOT_CAUSE_GRACE_S))

    def take_all(self) -> list[tuple[Evidence, int]]:
        """(error, call) of each: there is a loss that explains them."""
        held, self._held = self._held, []
        return [(error, call) for error, call, _ in held]

    def take_due(self) -> list[Evidence]:
        """Those that no loss followed in time."""
        now = time.monotonic()
        due = [error for error, _, until in self._held if now >= until]
        self._held = [held for held in self._held if now < held[2]]
        return due


def from_error(role: str, rank: int, error: ErrorBody, *, alone: bool) -> Evidence:
    """Evidence of a rank's ERROR message. A rank that computes `alone` has no peer to blame."""
    from_peer = error.cause in (Cause.PEER_GONE, Cause.PEER_LATE)
    return Evidence(
        role,
        rank,
        error.cause,
        error.message if error.known else f"{error.kind}: {error.message}",
        weight=Weight.SECONDARY if from_peer and not alone else Weight.ROOT,
        kind=error.kind,
        hint=error.hint,
        needs_log=from_peer or not error.known,
    )


def from_end(started: Started, code: int) -> Evidence:
    """Evidence of a process that ended. A signal is a root cause, an exit code perhaps not."""
    role, rank, message = started.role, started.ranks[0], describe_exit(code)
    weight = Weight.ROOT if code < 0 else Weight.EXIT
    if not started.is_launcher:
        hint = "SIGKILL from outside often means that memory ran out" if code == -signal.SIGKILL else ""
        return Evidence(role, rank, Cause.ENDED, message, weight, hint=hint)
    if blamed := first_failure(started.log_path):
        return Evidence(role, blamed[0], Cause.ENDED, describe_exit(blamed[1]))
    message = f"{started.launcher}: {message}"
    return Evidence(role, rank, Cause.ENDED, message, weight, log_name=started.log_path.name)
