"""All ranks' parts in one tensor, under whichever name torch has for it."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch import distributed as dist


def all_gather(whole: Tensor, part: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Fill `whole` [ranks · n] with the `part` [n] of each rank, in the order of ranks. A collective of the group;
    None: of all ranks."""
    # torch 2.13 renamed it and warns of the old name at every call; 2.9 has that one alone.
    gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(whole, part, group=group)
