"""Which rank is to blame. One rank's end shows on its peers as broken connections: those are echoes, not causes."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass

from rlctl.launch import Started, blamed_by_torchrun, describe_exit
from specs.messages import Message

_ECHO = 2  # weight of evidence
ECHO_GRACE_S = 2.0  # how long to wait for the cause behind an echo
_ECHOES = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Socket Timeout",
    "timed out",
    "Timed out",
    "remote process exited",
    "ncclRemoteError",
)


@dataclass(frozen=True)
class Evidence:
    """One sign of a failure. `weight` orders them: 0 is a cause; higher ones may follow from another rank's."""

    role: str
    rank: int
    cause: str
    weight: int = 0
    permanent: bool = False  # the rank is gone for good, not only this verb
    kind: str = ""
    hint: str = ""
    known: bool = False  # an RlctlError: its message says it all, no log lines are needed
    log_name: str = ""  # another log than the rank's own

    @property
    def is_echo(self) -> bool:
        """It looks like what another rank's end leaves on this one."""
        return self.weight >= _ECHO


class Verdicts:
    """Collects evidence until the cause is clear or the grace is over."""

    def __init__(self) -> None:
        self._evidence: list[Evidence] = []
        self._until = 0.0

    def add(self, evidence: Evidence, grace_s: float = ECHO_GRACE_S) -> None:
        if not self._evidence:
            self._until = time.monotonic() + grace_s
        self._evidence.append(evidence)

    @property
    def pending(self) -> bool:
        return bool(self._evidence)

    def root(self) -> Evidence | None:
        """The cause, as soon as it is known. What concerned one verb only is forgotten with it."""
        if not self._evidence:
            return None
        first = min(self._evidence, key=lambda evidence: evidence.weight)
        if first.weight > 0 and time.monotonic() < self._until:
            return None
        self._evidence = [evidence for evidence in self._evidence if evidence.permanent]
        return first


def from_error(role: str, rank: int, error: Message, *, alone: bool) -> Evidence:
    """Evidence of a rank's ERROR message. A rank that computes `alone` has no peer to blame."""
    body = error.body
    kind, text = str(body.get("kind", "")), str(body.get("message", ""))
    known = bool(body.get("known"))
    echo = not alone and not known and any(sign in text for sign in _ECHOES)
    return Evidence(
        role,
        rank,
        text if known else f"{kind}: {text}",
        weight=_ECHO if echo else 0,
        kind=kind,
        hint=str(body.get("hint", "")),
        known=known,
    )


def from_end(started: Started, code: int) -> Evidence:
    """A signal is a cause. An exit may echo another rank's end, or follow an error that is still on its way."""
    role, rank = started.role, started.ranks[0]
    if not started.is_launcher:
        hint = "SIGKILL from outside often means that memory ran out" if code == -signal.SIGKILL else ""
        return Evidence(role, rank, describe_exit(code), weight=0 if code < 0 else 1, permanent=True, hint=hint)
    if blamed := blamed_by_torchrun(started.log_path):
        return Evidence(role, blamed[0], describe_exit(blamed[1]), permanent=True)
    cause = f"{started.launcher}: {describe_exit(code)}"
    return Evidence(role, rank, cause, weight=0 if code < 0 else 1, permanent=True, log_name=started.log_path.name)
