"""Who sits where: the node, GPU and place in the mesh of every rank of a role.

A model that is cut across ranks lies on a mesh of two axes. `replicate` is the outer one: groups that each hold the
whole model. `shard` is the inner one: ranks of a group hold a part each. Ranks count along `shard` first, and fill a
node before the next, so that a group whose size fits into a node stays inside one:

    16 processes, 2 nodes, shard 8, replicate 2         rank 11 = replica 1, shard 3, node 1, local rank 3
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from specs.engine_tables import Fsdp2Engine, VllmEngine, ZeroEngine
from specs.schema import RoleSection


@dataclass(frozen=True)
class Mesh:
    """Ranks along each axis."""

    replicate: int
    shard: int

    @property
    def ranks(self) -> int:
        return self.replicate * self.shard


@dataclass(frozen=True)
class Seat:
    """One rank. `device` is the GPU's number on its node, None on the CPU."""

    rank: int
    node: int
    local_rank: int
    device: int | None
    replica: int
    shard: int


@dataclass(frozen=True)
class SeatGroup:
    """The ranks that hold one copy of the model together, in the order of their shards."""

    replica: int
    seats: tuple[Seat, ...]

    @property
    def nodes(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(seat.node for seat in self.seats))


def devices_of_a_process(section: RoleSection) -> int:
    """GPUs that each process of a role has: one, or all that its replica is cut across."""
    return int(getattr(getattr(section, "engine", None), "tensor_parallel", 1))


def mesh_of(section: RoleSection) -> Mesh | None:
    """The mesh that a role's engine asks for; None where every rank holds the whole model, or the engine is not ours.

    `shard` left out is what `replicate` leaves. The axes need not give the role's processes: a rule says so.
    """
    engine = getattr(section, "engine", None)
    if isinstance(engine, Fsdp2Engine):
        return Mesh(engine.replicate, engine.shard or max(1, section.processes // engine.replicate))
    if isinstance(engine, ZeroEngine):
        return Mesh(1, section.processes)
    return None


def built_mesh(section: RoleSection) -> dict[str, int]:
    """Axis → ranks, as the engine must report it in `ModelBuilt.mesh`: ZeRO has one axis, FSDP2 both, vLLM its own."""
    mesh, engine = mesh_of(section), getattr(section, "engine", None)
    if isinstance(engine, VllmEngine) and engine.tensor_parallel > 1:
        return {"tensor": engine.tensor_parallel}
    if mesh is None:
        return {}
    if isinstance(engine, ZeroEngine):
        return {"shard": mesh.shard}
    return {"replicate": mesh.replicate, "shard": mesh.shard}


def seat_groups(section: RoleSection) -> list[SeatGroup]:
    """One entry per copy of the model; empty where nothing is cut."""
    mesh = mesh_of(section)
    if mesh is None:
        return []
    seats = list(_seats(section, mesh))
    return [
        SeatGroup(replica, tuple(seats[replica * mesh.shard : (replica + 1) * mesh.shard]))
        for replica in range(mesh.replicate)
    ]


def straddling(section: RoleSection) -> list[SeatGroup]:
    """Groups whose ranks sit on more than one node: every gathered layer crosses the network."""
    return [group for group in seat_groups(section) if len(group.nodes) > 1]


def _seats(section: RoleSection, mesh: Mesh) -> Iterator[Seat]:
    per_node = max(1, section.processes // section.nodes)
    for rank in range(mesh.ranks):
        node, local = divmod(rank, per_node)
        device = section.devices[local] if local < len(section.devices) else None
        yield Seat(rank, node, local, device, rank // mesh.shard, rank % mesh.shard)
