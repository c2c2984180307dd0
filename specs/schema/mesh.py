"""Placement: the node, GPU and place in the mesh of every rank of a role.

A model that is cut across ranks lies on a mesh of two axes. `replicate` is the outer one: groups that each hold the
whole model. `shard` is the inner one: ranks of a group hold a part each. Ranks count along `shard` first, and fill a
node before the next, so that a group whose size fits into a node stays inside one:

    16 processes, 2 nodes, shard 8, replicate 2         rank 11 = replica 1, shard 3, node 1, local rank 3

An engine may number otherwise: `blocks` of neighbours make up a copy of the model, and the first blocks of all copies
come before the second ones (stages of a pipeline that lie furthest apart):

    8 processes, shard 4 in 2 blocks, replicate 2       copy 0 = ranks 0, 1, 4, 5; copy 1 = ranks 2, 3, 6, 7

The same ranks share out the samples along two other axes. `data` is the outer one: groups that each have samples of
their own. `sequence` is the inner one: ranks of a group have the same samples, and a part of each row. So rank 11, with
sequence 2, is number 1 of the group 5. How the model is cut does not matter to that, nor the other way round.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from specs.schema.engines.engine_table import engine_of

if TYPE_CHECKING:
    from specs.schema.spec import RoleSection

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

    @property
    def ranks(self) -> int:
        return self.replicate * self.shard

    def place(self, rank: int) -> tuple[int, int]:
        """Which copy of the model a rank has a part of, and which part."""
        neighbours = self.shard // self.blocks
        block, inside = divmod(rank, neighbours * self.replicate)
        copy, part = divmod(inside, neighbours)
        return copy, block * neighbours + part


@dataclass(frozen=True)
class RankPlacement:
    """One rank. `device` is the GPU's number on its node, None on the CPU."""

    rank: int
    node: int
    local_rank: int
    device: int | None
    replica: int
    shard: int
    data: int
    sequence: int


@dataclass(frozen=True)
class RankGroup:
    """Ranks that hold one copy of the model together, in the order of their shards; or that share samples, in the order
    of their parts."""

    number: int
    ranks: tuple[RankPlacement, ...]

    @property
    def nodes(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(rank.node for rank in self.ranks))


def devices_of_a_process(section: RoleSection) -> int:
    """GPUs that each process of a role has: one, or all that its replica is cut across."""
    engine = engine_of(section)
    return 1 if engine is None else engine.devices_per_process()


def mesh_of(section: RoleSection) -> Mesh | None:
    """The mesh that a role's model or samples are cut along; None where every rank holds the whole model and has
    samples of its own, or it is not known (`mesh_is_known`). The axes need not give the role's processes: a rule says
    so."""
    engine, sequence = engine_of(section), sequence_parallel_of(section)
    mesh = None if engine is None else engine.mesh(section.processes)
    if engine is None or mesh is None:
        return None
    cut = mesh.shard > 1 or sequence > 1 or engine.reported_mesh(section.processes)
    return replace(mesh, sequence=sequence) if cut else None


def sequence_parallel_of(section: RoleSection) -> int:
    """Ranks that share samples; 1 of a role that has no such key."""
    return int(getattr(section, "sequence_parallel", 1))


def axis_of(section: RoleSection, axis: str) -> int:
    """Ranks along an axis of the role's engine; 1 where it has none of that name."""
    engine = engine_of(section)
    axes = None if engine is None else engine.reported_mesh(section.processes)
    return (axes or {}).get(axis, 1)


def ranks_of_a_row(section: RoleSection) -> int:
    """Ranks of a trainer that compute the same rows together, of an engine that cuts models or rows."""
    return axis_of(section, TENSOR) * axis_of(section, PIPELINE) * axis_of(section, CONTEXT)


def mesh_is_known(section: RoleSection) -> bool:
    """Whether the role's engine says how its ranks hold the model. (A role without an engine holds none.)"""
    engine = engine_of(section)
    return engine is None or engine.mesh(section.processes) is not None


def built_mesh(section: RoleSection) -> dict[str, int] | None:
    """Axis → ranks, as the engine must report it in `ModelBuilt.mesh`; None where that is not known."""
    engine, sequence = engine_of(section), sequence_parallel_of(section)
    axes = None if engine is None else engine.reported_mesh(section.processes)
    return axes if axes is None or sequence == 1 else {**axes, SEQUENCE: sequence}


def shard_groups(section: RoleSection) -> list[RankGroup]:
    """One entry per copy of the model; empty where nothing is cut."""
    mesh = mesh_of(section)
    if mesh is None:
        return []
    by_copy = sorted(_ranks(section, mesh), key=lambda rank: (rank.replica, rank.shard))
    return _cut(by_copy, mesh.shard)


def layer_groups(section: RoleSection) -> list[RankGroup]:
    """One entry per copy of a layer: the ranks that compute it together, of all copies of the model. Stages of a
    pipeline only hand activations on."""
    mesh = mesh_of(section)
    if mesh is None:
        return []
    return _cut(list(_ranks(section, mesh)), max(1, mesh.shard // axis_of(section, PIPELINE)))


def sequence_groups(section: RoleSection) -> list[RankGroup]:
    """One entry per group of ranks that share samples; empty where each has its own."""
    mesh = mesh_of(section)
    return [] if mesh is None or mesh.sequence == 1 else _cut(list(_ranks(section, mesh)), mesh.sequence)


def expert_groups(section: RoleSection) -> list[RankGroup]:
    """One entry per group of neighbours that hold all experts of their layers together; empty where experts are not
    shared out."""
    mesh, shared = mesh_of(section), axis_of(section, EXPERT)
    if mesh is None or shared == 1:
        return []
    return _cut(list(_ranks(section, mesh)), shared * axis_of(section, EXPERT_TENSOR))


def straddling(groups: Sequence[RankGroup]) -> list[RankGroup]:
    """Groups whose ranks sit on more than one node: what they exchange for every layer crosses the network."""
    return [group for group in groups if len(group.nodes) > 1]


def _cut(ranks: Sequence[RankPlacement], size: int) -> list[RankGroup]:
    return [RankGroup(number, tuple(ranks[number * size :][:size])) for number in range(len(ranks) // size)]


def _ranks(section: RoleSection, mesh: Mesh) -> Iterator[RankPlacement]:
    per_node = max(1, section.processes // section.nodes)
    for rank in range(mesh.ranks):
        node, local = divmod(rank, per_node)
        device = section.devices[local] if local < len(section.devices) else None
        yield RankPlacement(rank, node, local, device, *mesh.place(rank), *divmod(rank, mesh.sequence))


def divisors(number: int) -> list[int]:
    """All sizes of groups that so many ranks, heads or layers can be shared out to evenly, ascending."""
    return [n for n in range(1, number + 1) if number % n == 0]
