"""Parts of a rank's memory, and when they are held: the words of `rlctl plan`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

GIB = 2**30

# The phases of a step (specs/phases.py). Of the phase `train`, "train" is its forward and backward passes, "optimizer"
# its optimizer steps: they hold different things.
Moment = Literal["rollout", "score", "train", "optimizer", "sync"]
MOMENTS: tuple[Moment, ...] = ("rollout", "score", "train", "optimizer", "sync")
ALWAYS = frozenset(MOMENTS)
SCORING: frozenset[Moment] = frozenset({"score"})  # of a run with a reward model
SAMPLING: frozenset[Moment] = frozenset({"rollout", "score"})  # while no learner has a shared device
LEARNING: frozenset[Moment] = frozenset({"train", "optimizer"})

DTYPE_BYTES = {"fp32": 4, "bf16": 2}
ADAM_BYTES = 8  # two fp32 moments

BLOCKS, BLOCK_BYTES = 8, 512 * 2**10  # of the ring of shared memory, in the CPU's cache; a block fits a core's


@dataclass(frozen=True)
class Part:
    """Bytes of one rank in some phases. `exact`: follows from shapes and dtypes, to 1 %; else an estimate.

    `host`: in host memory although the rank computes on a GPU. `leaves`: moves to the host while another role has a
    shared device, or (`dropped`) is let go of. `context`: of the process, not in what allocators report.
    `first_rank`: only the first rank has it. `of_tokens`: it grows with the tokens of a micro-batch. `avoided_by`: a
    key of its engine.
    """

    name: str
    nbytes: int
    phases: frozenset[Moment] = ALWAYS
    exact: bool = False
    host: bool = False
    leaves: bool = False
    dropped: bool = False
    context: bool = False
    first_rank: bool = False
    avoided_by: str = ""
    of_tokens: bool = False


def pinned_rounding(sizes: Iterable[int]) -> int:
    """Return the bytes that torch takes beyond tensors of these sizes in pinned memory: it rounds each up to a power of
    two (CachingHostAllocator.h)."""
    return sum((1 << (size - 1).bit_length()) - size for size in sizes if size)


def total(parts: Iterable[Part], phase: Moment) -> int:
    """Return the bytes in a phase."""
    return sum(part.nbytes for part in parts if phase in part.phases)


def peak(parts: Iterable[Part]) -> int:
    """Return the bytes in the fullest phase."""
    kept = list(parts)
    return max(total(kept, phase) for phase in MOMENTS)
