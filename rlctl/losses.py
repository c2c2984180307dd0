"""Ranks that are lost but need not end the run: replicas that can be started again, a bounded number of times.

A rank is lost when its process ended, when it gave no sign of life, or when it says that its engine died. What would
only repeat (an error that a verb raised, a missed deadline) ends the run as with any role.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from rlctl.failures import ECHO_GRACE_S, Evidence
from specs.errors import SamplerDied
from specs.messages import Verb

Place = tuple[str, int]  # role, rank

# A rank that ends takes the others' connections with it, where weights go over a process group.
JOINED_VERBS = frozenset({Verb.EXPORT_BUCKET, Verb.EXPORT_END, Verb.IMPORT_BEGIN, Verb.IMPORT_BUCKET, Verb.IMPORT_END})


@dataclass
class Losses:
    """Which ranks are lost now, and how many restarts are left. `role` "": no rank may be lost."""

    role: str = ""
    limit: int = 0
    on_loss: Callable[[Evidence], None] = lambda evidence: None
    restarts: int = 0
    lost: dict[Place, Evidence] = field(default_factory=dict)
    _leaving: dict[Place, tuple[Evidence, float]] = field(default_factory=dict)
    _echoes: list[tuple[Evidence, int, float]] = field(default_factory=list)

    def ranks(self, role: str) -> list[int]:
        """Lost ranks of a role."""
        return sorted(rank for name, rank in self.lost if name == role)

    @property
    def any_now(self) -> bool:
        """A rank is lost, or about to be."""
        return bool(self.lost or self._leaving)

    def takes(self, evidence: Evidence, grace_s: float = 0.0) -> bool:
        """Whether this is the loss of a rank that may be started again. It counts as lost only after `grace_s`: what
        it sent before may still be on its way."""
        place = evidence.role, evidence.rank
        if evidence.role != self.role or not (evidence.permanent or evidence.kind == SamplerDied.__name__):
            return False
        if place in self.lost or place in self._leaving:
            return True
        if self.restarts + len(self.lost) + len(self._leaving) >= self.limit:
            return False
        self._leaving[place] = evidence, time.monotonic() + grace_s
        return True

    def hold(self, echo: Evidence, call: int) -> None:
        """An error in call number `call` that may be the echo of a loss not yet noticed."""
        self._echoes.append((echo, call, time.monotonic() + ECHO_GRACE_S))

    def newly_lost(self) -> list[Evidence]:
        """Those whose grace is over, each once."""
        now = time.monotonic()
        due = [evidence for evidence, until in self._leaving.values() if now >= until]
        for evidence in due:
            place = evidence.role, evidence.rank
            self.lost[place] = evidence
            del self._leaving[place]
        return due

    def explained(self) -> list[tuple[Evidence, int]]:
        """(evidence, call) of the errors that a loss explains, each once."""
        if not self.lost:
            return []
        found, self._echoes = [(evidence, call) for evidence, call, _ in self._echoes], []
        return found

    def unexplained(self) -> list[Evidence]:
        """Held errors that no loss followed in time, each once."""
        now = time.monotonic()
        due = [evidence for evidence, _, until in self._echoes if now >= until and not self.any_now]
        self._echoes = [held for held in self._echoes if held[0] not in due]
        return due

    def begin_restart(self, role: str) -> list[int]:
        """The lost ranks of a role are lost no more; each is a restart."""
        ranks = self.ranks(role)
        for rank in ranks:
            del self.lost[role, rank]
        self.restarts += len(ranks)
        return ranks

    def not_back(self, lost: Mapping[Place, Evidence]) -> None:
        """A restart of these was broken off: they are lost as before, and it does not count."""
        self.restarts -= len(lost.keys() - self.lost.keys())
        self.lost |= lost

    def remark(self, role: str) -> str:
        """What a failure of `role` should say about earlier restarts."""
        if role != self.role or not self.restarts:
            return ""
        times = "once" if self.restarts == 1 else f"{self.restarts} times"
        return f" ({role} ranks were started again {times} before; rollout.max_restarts = {self.limit})"
