"""The ranks that share a row, and which of its rows each has.

The ranks of a role lie on data × sequence: a sequence group is `degree` consecutive ranks. `own_rows` is the only place
that says how a row is split.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch import distributed as dist

from backends.protocol import COLLECTIVE_TIMEOUT, Rank


@dataclass(frozen=True)
class SequenceGroup:
    """`size` ranks that share rows; this process is number `rank` of them. `group`: None for one rank alone."""

    group: dist.ProcessGroup | None
    size: int
    rank: int

    @property
    def alone(self) -> bool:
        return self.size == 1

    def padding(self, tokens: int) -> int:
        """Tokens that a row of so many lacks to be split into equal parts. They become a segment of their own."""
        return -tokens % self.size

    def own_rows(self, tokens: int) -> NDArray[np.int64]:
        """Rows that this rank has of a (padded) row of so many tokens, in the order in which it has them."""
        assert tokens % self.size == 0, f"{tokens} rows are not padded to {self.size} ranks"
        part = tokens // self.size
        return np.arange(self.rank * part, (self.rank + 1) * part)


ALONE = SequenceGroup(None, 1, 0)


def sequence_group(rank: Rank, degree: int) -> SequenceGroup:
    """This rank's sequence group. All ranks of the role call it together; the role's process group exists."""
    assert rank.world_size % degree == 0, f"{rank.world_size} ranks do not make groups of {degree}"
    if degree == 1:
        return ALONE
    groups = [
        dist.new_group(list(range(first, first + degree)), timeout=COLLECTIVE_TIMEOUT)
        for first in range(0, rank.world_size, degree)
    ]
    mine = groups[rank.rank // degree]
    assert isinstance(mine, dist.ProcessGroup), "this rank is in the group of its number"
    return SequenceGroup(mine, degree, rank.rank % degree)


def all_gather(whole: Tensor, part: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Fill `whole` [ranks · n] with the `part` [n] of each rank, in the order of ranks. A collective of the group;
    None: of all ranks."""
    # torch 2.13 renamed it and warns of the old name at every call; 2.9 has that one alone.
    gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(whole, part, group=group)
