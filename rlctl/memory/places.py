"""Where the memory of the roles adds up: the GPUs and hosts of a run, which ranks share each, and how much it has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from specs.memory_parts import GIB, MOMENTS, Moment, Part, peak, total
from specs.schema.rank_groups import hosts_of_rank, processes_of_a_node
from specs.schema.roles import RoleName
from specs.schema.spec import Spec


@dataclass(frozen=True)
class RoleMemory:
    """The memory of a rank of a role: every rank holds the same, or less than the one that is meant here."""

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


@dataclass(frozen=True)
class Place:
    """Devices of the same kind with the same ranks on them: GPUs, or hosts."""

    kind: str  # "GPU" or "host"
    names: tuple[str, ...]
    phases: dict[Moment, dict[str, int]]  # phase → role → bytes
    memory: int  # bytes; 0: not known
    largest: tuple[RoleName, Part] | None  # of one rank, in the fullest phase
    not_known: tuple[RoleName, ...] = ()  # roles here that hold more than `phases` says: their engines do not say it

    def bytes_in(self, phase: Moment) -> int:
        return sum(self.phases[phase].values())

    @property
    def name(self) -> str:
        first, *more = self.names
        return f"{first} … {more[-1]} ({len(self.names)} alike)" if more else first

    @property
    def fits(self) -> bool | None:
        """Whether its memory holds what is planned. None: not known."""
        if not self.memory:
            return None
        return False if self.peak > self.memory else None if self.not_known else True

    @property
    def fullest(self) -> Moment:
        return max(MOMENTS, key=self.bytes_in)

    @property
    def peak(self) -> int:
        return self.bytes_in(self.fullest)


def places_of(spec: Spec, roles: Sequence[RoleMemory], gpu_GiB: float, host_GiB: float) -> Iterator[Place]:
    """Yield GPUs and hosts, those with the same ranks on them together."""
    tenants: dict[tuple[str, int, int], list[tuple[RoleName, tuple[Part, ...]]]] = {}  # (kind, node, GPU) → ranks there
    for role in roles:
        section = spec.role(role.role)
        per_node = processes_of_a_node(section)
        for rank in range(section.processes):
            local = rank % per_node
            numbers = section.devices[local * role.devices_of_rank : (local + 1) * role.devices_of_rank]
            own = [part for part in role.parts if rank == 0 or not part.first_rank]
            on_device, on_host = (tuple(part for part in own if part.host == host) for host in (False, True))
            for node in hosts_of_rank(section, rank):
                for number in numbers:
                    tenants.setdefault(("GPU", node, number), []).append((role.role, on_device))
                if beside := on_device if role.device == "cpu" else on_host:
                    tenants.setdefault(("host", node, 0), []).append((role.role, beside))
    alike: dict[tuple[str, tuple[tuple[RoleName, tuple[Part, ...]], ...]], list[str]] = {}
    for (kind, node, number), there in sorted(tenants.items(), key=lambda item: item[0]):
        name = f"node {node} GPU {number}" if kind == "GPU" else f"node {node}"
        alike.setdefault((kind, tuple(there)), []).append(name)
    for (kind, same), names in alike.items():
        phases: dict[Moment, dict[str, int]] = {phase: {} for phase in MOMENTS}
        for phase, held in phases.items():
            for here, parts in same:
                held[here] = held.get(here, 0) + total(parts, phase)
        fullest = max(MOMENTS, key=lambda phase: sum(phases[phase].values()))
        then = [(here, part) for here, parts in same for part in parts if fullest in part.phases]
        largest = max(then, key=lambda each: each[1].nbytes, default=None)
        memory = int((gpu_GiB if kind == "GPU" else host_GiB) * GIB)
        open_ = tuple(role.role for role in roles if role.not_known and role.role in phases[fullest])
        yield Place(kind, tuple(names), phases, memory, largest, open_)
