"""Placement: the node, GPU and place in the mesh of every rank of a role.

A model that is cut across ranks lies on a mesh of two axes. `replicate` is the outer one: groups that each hold the
whole model. `shard` is the inner one: ranks of a group hold a part each. Ranks count along `shard` first, and fill a
node before the next, so that a group whose size fits into a node stays inside one:

    16 processes, 2 nodes, shard 8, replicate 2         rank 11 = replica 1, shard 3, node 1, local rank 3
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specs.schema.engines.engine_table import engine_of

if TYPE_CHECKING:
    from specs.schema.spec import RoleSection


@dataclass(frozen=True)
class Mesh:
    """Ranks along each axis."""

    replicate: int
    shard: int

    @property
    def ranks(self) -> int:
        return self.replicate * self.shard


@dataclass(frozen=True)
class RankPlacement:
    """One rank. `device` is the GPU's number on its node, None on the CPU."""

    rank: int
    node: int
    local_rank: int
    device: int | None
    replica: int
    shard: int


@dataclass(frozen=True)
class ShardGroup:
    """The ranks that hold one copy of the model together, in the order of their shards."""

    replica: int
    ranks: tuple[RankPlacement, ...]

    @property
    def nodes(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(rank.node for rank in self.ranks))


def devices_of_a_process(section: RoleSection) -> int:
    """GPUs that each process of a role has: one, or all that its replica is cut across."""
    engine = engine_of(section)
    return 1 if engine is None else engine.devices_per_process()


def mesh_of(section: RoleSection) -> Mesh | None:
    """The mesh that a role's model is cut along; None where every rank holds the whole model, or it is not known
    (`mesh_is_known`). The axes need not give the role's processes: a rule says so."""
    engine = engine_of(section)
    mesh = None if engine is None else engine.mesh(section.processes)
    if engine is None or mesh is None or (mesh.shard == 1 and not engine.reported_mesh(section.processes)):
        return None
    return mesh


def mesh_is_known(section: RoleSection) -> bool:
    """Whether the role's engine says how its ranks hold the model. (A role without an engine holds none.)"""
    engine = engine_of(section)
    return engine is None or engine.mesh(section.processes) is not None


def built_mesh(section: RoleSection) -> dict[str, int] | None:
    """Axis → ranks, as the engine must report it in `ModelBuilt.mesh`; None where that is not known."""
    engine = engine_of(section)
    return None if engine is None else engine.reported_mesh(section.processes)


def shard_groups(section: RoleSection) -> list[ShardGroup]:
    """One entry per copy of the model; empty where nothing is cut."""
    mesh = mesh_of(section)
    if mesh is None:
        return []
    ranks = list(_ranks(section, mesh))
    return [
        ShardGroup(replica, tuple(ranks[replica * mesh.shard : (replica + 1) * mesh.shard]))
        for replica in range(mesh.replicate)
    ]


def straddling(section: RoleSection) -> list[ShardGroup]:
    """Groups whose ranks sit on more than one node: every gathered layer crosses the network."""
    return [group for group in shard_groups(section) if len(group.nodes) > 1]


def _ranks(section: RoleSection, mesh: Mesh) -> Iterator[RankPlacement]:
    per_node = max(1, section.processes // section.nodes)
    for rank in range(mesh.ranks):
        node, local = divmod(rank, per_node)
        device = section.devices[local] if local < len(section.devices) else None
        yield RankPlacement(rank, node, local, device, rank // mesh.shard, rank % mesh.shard)
