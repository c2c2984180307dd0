"""What one role takes of memory, by rank."""

from __future__ import annotations

from dataclasses import dataclass

from specs.memory_parts import Part, peak
from specs.schema.roles import RoleName


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
    not_known: tuple[str, ...] = ()  # what its engine does not say: `parts` are then less than it holds

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
