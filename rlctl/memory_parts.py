"""What takes memory in a rank, and when: the words of `rlctl plan`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from specs.schema import RoleName

GIB = 2**30

Phase = Literal["generate", "learn", "step", "sync"]
# `learn`: forward and backward passes; `step`: the optimizer step.
PHASES: tuple[Phase, ...] = ("generate", "learn", "step", "sync")
ALWAYS = frozenset(PHASES)
LEARNING: frozenset[Phase] = frozenset({"learn", "step"})

DTYPE_BYTES = {"fp32": 4, "bf16": 2}
ADAM_BYTES = 8  # two fp32 moments


@dataclass(frozen=True)
class Part:
    """Bytes of one rank in some phases. `exact`: follows from shapes and dtypes, to 1 %; else an estimate.

    `host`: in host memory although the rank computes on a GPU. `leaves`: moves to the host while another role has a
    shared device, or (`dropped`) is let go of. `context`: of the process, not in what allocators report.
    `first_rank`: only the first rank has it.
    """

    name: str
    nbytes: int
    phases: frozenset[Phase] = ALWAYS
    exact: bool = False
    host: bool = False
    leaves: bool = False
    dropped: bool = False
    context: bool = False
    first_rank: bool = False


def total(parts: Iterable[Part], phase: Phase) -> int:
    """Bytes in a phase."""
    return sum(part.nbytes for part in parts if phase in part.phases)


def peak(parts: Iterable[Part]) -> int:
    """Bytes in the fullest phase."""
    kept = list(parts)
    return max(total(kept, phase) for phase in PHASES)


@dataclass(frozen=True)
class RoleMemory:
    """One role: every rank holds the same, or less than the one that is meant here."""

    role: RoleName
    engine: str
    ranks: int
    device: str  # "cpu" or "cuda"
    devices_of_rank: int
    parts: tuple[Part, ...]
    source: str  # where the parameters are known from

    @property
    def on_device(self) -> tuple[Part, ...]:
        return tuple(part for part in self.parts if not part.host)

    @property
    def on_host(self) -> tuple[Part, ...]:
        return tuple(part for part in self.parts if part.host)

    @property
    def measurable_bytes(self) -> int:
        """The peak that a rank itself can measure: without the context, which no allocator reports."""
        return peak(part for part in self.on_device if not part.context)
