"""Where the memory of the roles adds up: the GPUs and hosts of a run, which ranks share each, and how much it has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from specs.memory_parts import GIB, MOMENTS, Moment, Part, peak, total
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
        return f"{first} … {self.names[-1]} ({len(self.names)} alike)" if more else first

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
    tenants: dict[tuple[str, int, int], list[Tenant]] = {}  # (kind, node, GPU) → who is there
    for role in roles:
        section = spec.role(role.role)
        per_node = max(1, section.processes // section.nodes)
        for rank in range(section.processes):
            node, local = section.hosts[rank // per_node], rank % per_node
            for number in section.devices[local * role.devices_of_rank : (local + 1) * role.devices_of_rank]:
                tenants.setdefault(("GPU", node, number), []).append(Tenant.of(role, role.on_device, rank))
            beside = role.on_device if role.device == "cpu" else role.on_host
            if beside:
                tenants.setdefault(("host", node, 0), []).append(Tenant.of(role, beside, rank))
    alike: dict[tuple[str, tuple[Tenant, ...]], list[tuple[str, int, int]]] = {}
    for place, there in sorted(tenants.items(), key=lambda item: item[0]):
        alike.setdefault((place[0], tuple(there)), []).append(place)
    for (kind, same), places in alike.items():
        phases = {phase: _by_role(same, phase) for phase in MOMENTS}
        fullest = max(MOMENTS, key=lambda phase: sum(phases[phase].values()))
        held = [(tenant.role, part) for tenant in same for part in tenant.parts if fullest in part.phases]
        largest = max(held, key=lambda each: each[1].nbytes, default=None)
        memory = gpu_GiB if kind == "GPU" else host_GiB
        here = {tenant.role for tenant in same}
        open_ = tuple(role.role for role in roles if role.not_known and role.role in here)
        yield Place(kind, tuple(_name(place) for place in places), phases, int(memory * GIB), largest, open_)


@dataclass(frozen=True)
class Tenant:
    """A rank's parts in one place."""

    role: RoleName
    parts: tuple[Part, ...]

    @classmethod
    def of(cls, role: RoleMemory, parts: Sequence[Part], rank: int) -> Tenant:
        return cls(role.role, tuple(part for part in parts if rank == 0 or not part.first_rank))


def _by_role(tenants: Sequence[Tenant], phase: Moment) -> dict[str, int]:
    found: dict[str, int] = {}
    for tenant in tenants:
        found[tenant.role] = found.get(tenant.role, 0) + total(tenant.parts, phase)
    return found


def _name(place: tuple[str, int, int]) -> str:
    kind, node, number = place
    return f"node {node} GPU {number}" if kind == "GPU" else f"node {node}"
