"""Placement: the node, GPU and place in the mesh of every rank of a role, and the groups that ranks form."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from specs.schema.engines.engine_table import engine_of
from specs.schema.mesh import CONTEXT, PIPELINE, SEQUENCE, TENSOR, Mesh
from specs.schema.role_section import RoleSection


@dataclass(frozen=True)
class RankPlacement:
    """One rank. `devices` are its GPUs by their numbers on each of its `nodes`, counted from `node`; none on the
    CPU."""

    rank: int
    node: int
    local_rank: int
    devices: tuple[int, ...]
    replica: int
    shard: int
    data: int
    sequence: int
    nodes: int = 1

    @property
    def on(self) -> range:
        return range(self.node, self.node + self.nodes)


@dataclass(frozen=True)
class RankGroup:
    """Ranks that hold one copy of the model together, in the order of their shards; or that share samples, in the order
    of their parts."""

    number: int
    ranks: tuple[RankPlacement, ...]

    @property
    def nodes(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(node for rank in self.ranks for node in rank.on))


def devices_of_a_process(section: RoleSection) -> int:
    """Return the GPUs that each process of a role has: one, or all that its replica is sharded across."""
    engine = engine_of(section)
    return 1 if engine is None else engine.devices_per_process()


def processes_of_a_node(section: RoleSection) -> int:
    """Return how many processes a role has on each node that has any."""
    return max(1, section.processes // section.nodes)


def nodes_of_a_process(section: RoleSection) -> int:
    """Return the nodes that each process's model lies on: one, or those that its replica spans."""
    return max(1, section.nodes // section.processes)


def hosts_of_rank(section: RoleSection, rank: int) -> range:
    """Return the numbers of the hosts that a rank is on: usually one; the first one has its process."""
    span = nodes_of_a_process(section)
    first = rank // processes_of_a_node(section) * span
    return section.hosts[first : first + span]


def mesh_of(section: RoleSection) -> Mesh | None:
    """Return the mesh of a role's ranks; None where its engine does not say how they hold the model, or it has none.
    The axes need not give the role's processes: a rule says so."""
    engine = engine_of(section)
    mesh = None if engine is None else engine.mesh(section.processes)
    return None if mesh is None else replace(mesh, sequence=sequence_parallel_of(section))


def sequence_parallel_of(section: RoleSection) -> int:
    """Return the ranks that share samples; 1 of a role that has no such key."""
    return int(getattr(section, "sequence_parallel", 1))


def axis_of(section: RoleSection, axis: str) -> int:
    """Return the ranks along an axis of the role's engine; 1 where it has none of that name."""
    return (built_mesh(section) or {}).get(axis, 1)


def ranks_of_a_row(section: RoleSection) -> int:
    """Return how many ranks of a trainer compute the same rows together."""
    return axis_of(section, TENSOR) * axis_of(section, PIPELINE) * axis_of(section, CONTEXT)


def built_mesh(section: RoleSection) -> dict[str, int] | None:
    """Return axis → ranks, as the engine must report it in `ModelBuilt.mesh`; None where that is not known."""
    mesh = mesh_of(section)
    if mesh is None or mesh.axes is None:
        return None
    return {**mesh.axes, **({SEQUENCE: mesh.sequence} if mesh.sequence > 1 else {})}


def shard_groups(section: RoleSection) -> list[RankGroup]:
    """Return one group per copy of the model; empty where nothing is sharded."""
    mesh = mesh_of(section)
    if mesh is None or not mesh.is_sharded:
        return []
    by_copy = sorted(_ranks(section, mesh), key=lambda rank: (rank.replica, rank.shard))
    return _split(by_copy, mesh.shard)


def sequence_groups(section: RoleSection) -> list[RankGroup]:
    """Return one group of ranks that share samples; empty where each has its own."""
    mesh = mesh_of(section)
    return [] if mesh is None or mesh.sequence == 1 else _split(list(_ranks(section, mesh)), mesh.sequence)


def _split(ranks: Sequence[RankPlacement], size: int) -> list[RankGroup]:
    return [RankGroup(number, tuple(ranks[number * size :][:size])) for number in range(len(ranks) // size)]


def _ranks(section: RoleSection, mesh: Mesh) -> Iterator[RankPlacement]:
    per_node, span, each = processes_of_a_node(section), nodes_of_a_process(section), devices_of_a_process(section)
    for rank in range(mesh.ranks):
        node, local = divmod(rank, per_node)
        devices = tuple(section.devices[local * each : (local + 1) * each])
        shared = divmod(rank, mesh.sequence)
        yield RankPlacement(rank, node * span, local, devices, *mesh.place(rank), *shared, nodes=span)
