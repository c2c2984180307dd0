"""Which rank is to blame. When one rank fails, connections break on its peers: their errors are secondary failures, and
they wait for the root cause. Everything is decided by typed causes and exit codes; messages are for people.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from rlctl.processes.far_ranks import FarRank
from rlctl.processes.launch import Started, describe_exit
from rlctl.processes.torchrun_report import codes_of_failures
from specs.errors import Cause
from specs.wire.error_body import ErrorBody
from specs.wire.messages import Verb

ROOT_CAUSE_GRACE_S = 2.0  # how long a failure that may be secondary waits for its root cause
# The same where a launcher stands between: it ends the other ranks before it says which one failed.
LAUNCHER_GRACE_S = 20.0

# Verbs in which ranks of several roles wait for each other: the end of one breaks the connections of the others.
JOINED_VERBS = frozenset({Verb.EXPORT_BUCKET, Verb.EXPORT_END, Verb.IMPORT_BEGIN, Verb.IMPORT_BUCKET, Verb.IMPORT_END})


class Weight(IntEnum):
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
        self._until: dict[Weight, float] = {}  # when the first evidence of a weight is blamed if none better came

    def add(self, evidence: Evidence, grace_s: float = ROOT_CAUSE_GRACE_S) -> None:
        until = time.monotonic() + grace_s
        self._until[evidence.weight] = min(until, self._until.get(evidence.weight, until))
        self._evidence.append(evidence)

    @property
    def pending(self) -> bool:
        return bool(self._evidence)

    def root_cause(self) -> Evidence | None:
        """The evidence to blame, as soon as that is settled. What concerned one verb only is then forgotten."""
        if not self._evidence:
            return None
        first = min(self._evidence, key=lambda evidence: evidence.weight)
        if first.weight > Weight.ROOT and time.monotonic() < self._until[first.weight]:
            return None
        self._evidence = [evidence for evidence in self._evidence if evidence.permanent]
        left = {evidence.weight for evidence in self._evidence}
        self._until = {weight: until for weight, until in self._until.items() if weight in left}
        return first


class HeldErrors:
    """Errors of calls that may follow from the loss of a rank that nobody has noticed yet."""

    def __init__(self) -> None:
        self._held: list[tuple[Evidence, int, float]] = []

    def hold(self, error: Evidence, call: int, grace_s: float = ROOT_CAUSE_GRACE_S) -> None:
        """An error in call number `call`."""
        self._held.append((error, call, time.monotonic() + grace_s))

    def take_all(self) -> list[tuple[Evidence, int]]:
        """(error, call) of each: there is a loss that explains them."""
        held, self._held = self._held, []
        return [(error, call) for error, call, _ in held]

    def take_due(self) -> list[Evidence]:
        """Errors that no loss followed in time."""
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


def from_end(started: Started, code: int, first: Sequence[int] = ()) -> Evidence:
    """Evidence of a process that ended. `first`: of a launcher's ranks, those that were seen to end before others."""
    role, rank = started.role, started.ranks[0]
    if isinstance(started.process, FarRank) and not started.process.has_told:
        message = f"the line to {started.host} ended ({describe_exit(code)}): every {role} there is lost"
        return Evidence(role, rank, Cause.ENDED, message, log_name=started.process.line.log_path.name)
    if not started.is_launcher:
        return from_rank_end(role, rank, code)
    report = codes_of_failures(started.log_path)
    of_first = [rank for rank in report if rank in first] or list(report)
    if of_first:
        blamed = min(of_first, key=lambda rank: _order(report[rank]))
        return from_rank_end(role, blamed, report[blamed], reported=True)
    message = f"{started.launcher}: {describe_exit(code)}"
    weight = Weight.ROOT if code < 0 else Weight.EXIT
    return Evidence(role, rank, Cause.ENDED, message, weight, log_name=started.log_path.name)


def from_rank_end(
    role: str, rank: int, code: int | None, *, reported: bool = False, others: Sequence[int] = ()
) -> Evidence:
    """Evidence of a rank's process that ended. A signal is a root cause, unless it is one that follows from others; an
    exit code perhaps not, unless its launcher reports it as the first. None: only its launcher knows how it ended.
    `others`: ranks that were seen to have ended at the same time; which of them was first is then not known either."""
    if code is None:
        message = "its process ended"
        if others:
            message += f", and so did that of rank {', '.join(map(str, others))}: which was first is not known"
        return Evidence(role, rank, Cause.ENDED, message, Weight.EXIT)
    root = reported or (code < 0 and code not in _FROM_OTHERS)
    hint = "SIGKILL from outside often means that memory ran out" if code == -signal.SIGKILL else ""
    return Evidence(role, rank, Cause.ENDED, describe_exit(code), Weight.ROOT if root else Weight.EXIT, hint=hint)


def first_to_end(codes: Mapping[int, int | None]) -> int:
    """Of ranks below a launcher that were seen to have ended at the same time, the one that probably was the first."""
    return min(codes, key=lambda rank: _order(codes[rank]))


def perhaps_first(codes: Mapping[int, int | None], blamed: int) -> list[int]:
    """The other ranks of which it is not known that they ended after `blamed`: SIGKILL may have come from outside, or
    from the launcher once that one had ended."""
    return [rank for rank, code in codes.items() if rank != blamed and code in (None, -signal.SIGKILL)]


_FROM_OTHERS = (-signal.SIGABRT, -signal.SIGTERM)


def _order(code: int | None) -> int:
    """Which of several ends came first. A launcher has taken the code of that one (None) and then ends the others with
    SIGTERM or SIGKILL; a process aborts itself when its peer is gone."""
    if code is None:
        return 1
    if code >= 0:
        return 3
    if code in _FROM_OTHERS:
        return 4
    return 2 if code == -signal.SIGKILL else 0
