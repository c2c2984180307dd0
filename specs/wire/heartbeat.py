"""A rank's account of itself in a heartbeat while it serves a verb."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pydantic import BaseModel, ConfigDict

FLIGHT_RECORDER = "flight_recorder_rank"  # how dumps of it begin, in the folder of a role's logs


class Activity(BaseModel):
    """A rank at work. `counts` are of the whole life of the process and only grow: when one has grown, the rank has
    moved. A unit is singular ("token", "micro-batch")."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    verb: str
    call: int
    seconds: float  # since the verb began
    what: str  # verb and size: "generate of 12 prompts, longest 8,192 tokens"
    unit: str = ""  # what is counted in this verb; empty: nothing yet
    so_far: int = 0  # of `unit`, in this verb
    of_all: int = 0  # that this verb has to do; 0: nobody knows
    counts: Mapping[str, int] = {}
    counted: bool = True  # a verb that goes well counts something, or is short: one that does neither has stalled
    waits_for: str = ""  # a peer, or the other ranks; empty: it computes
    where: str = ""  # the innermost Python function of the main thread

    def words(self) -> str:
        """The verb and how far it is."""
        return f"{self.what}, {amount(self.so_far, self.unit)} so far" if self.unit else self.what

    @property
    def eta_s(self) -> float:
        """Estimate the seconds that the verb still takes, at its pace so far; 0 where that cannot be known."""
        return self.seconds / self.so_far * max(0, self.of_all - self.so_far) if self.so_far else 0.0


@dataclass(frozen=True)
class Moving:
    """Work that all ranks together have done since the start, by unit; which units those at work count; for how many
    seconds nothing has moved that should (0: something does, or cannot be seen); and how many are left of what takes
    longest (0: nobody knows)."""

    done: Mapping[str, int] = field(default_factory=dict)
    units: tuple[str, ...] = ()
    still_s: float = 0.0
    eta_s: float = 0.0


def amount(things: int, unit: str, plural: str = "s") -> str:
    """1 token, 1,234 tokens, 2 micro-batches."""
    plural = "es" if unit.endswith("ch") else plural
    return f"{things:,} {unit}{'' if things == 1 else plural}"
