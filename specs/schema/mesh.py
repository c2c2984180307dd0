"""The mesh that a model and its samples are sharded along.

A model that is sharded across ranks lies on a mesh of two axes. `replicate` is the outer one: groups that each hold the
whole model. `shard` is the inner one: ranks of a group hold a part each. Ranks count along `shard` first, and fill a
node before the next, so that a group whose size fits into a node stays inside one:

    16 processes, 2 nodes, shard 8, replicate 2         rank 11 = replica 1, shard 3, node 1, local rank 3

An engine may number otherwise: `blocks` of neighbours make up a copy of the model, and the first blocks of all copies
come before the second ones (stages of a pipeline that lie furthest apart):

    8 processes, shard 4 in 2 blocks, replicate 2       copy 0 = ranks 0, 1, 4, 5; copy 1 = ranks 2, 3, 6, 7

The same ranks share out the samples along two other axes. `data` is the outer one: groups that each have samples of
their own. `sequence` is the inner one: ranks of a group have the same samples, and a part of each row. So rank 11, with
sequence 2, is number 1 of the group 5. How the model is sharded does not matter to that, nor the other way round.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

SEQUENCE = "sequence"
"""The axis in `ModelBuilt.mesh` of a role whose ranks share samples."""
TENSOR, PIPELINE = "tensor", "pipeline"
"""The axes of an engine whose ranks hold a part of each layer, or some of the layers."""
CONTEXT = "context"
"""The axis of an engine whose ranks hold the same of a model and compute a part of each row."""
EXPERT, EXPERT_TENSOR = "expert", "expert tensor"
"""The axes of an engine whose ranks share out the experts of a layer, or hold a part of each."""


@dataclass(frozen=True)
class Mesh:
    """Ranks along each axis; those along `sequence` are the same ranks again."""

    replicate: int
    shard: int
    sequence: int = 1
    blocks: int = 1  # of neighbours, that a copy of the model lies in
    axes: Mapping[str, int] | None = None
    """Axis → ranks, as each rank must report it in `ModelBuilt.mesh`; {}: no axis. None: not known."""

    @property
    def ranks(self) -> int:
        return self.replicate * self.shard

    @property
    def is_sharded(self) -> bool:
        """Whether a rank holds less than the whole model, or has less than samples of its own."""
        return self.shard > 1 or self.sequence > 1 or bool(self.axes)

    def place(self, rank: int) -> tuple[int, int]:
        """Return which copy of the model a rank has a part of, and which part."""
        neighbours = self.shard // self.blocks
        block, inside = divmod(rank, neighbours * self.replicate)
        copy, part = divmod(inside, neighbours)
        return copy, block * neighbours + part


def divisors(number: int) -> list[int]:
    """Return all sizes of groups that so many ranks, heads or layers can be shared out to evenly, ascending."""
    return [n for n in range(1, number + 1) if number % n == 0]
