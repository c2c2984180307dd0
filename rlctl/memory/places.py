"""Where the memory of the roles adds up: the GPUs and hosts of a run, who is on each, and how much they have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rlctl.memory.role_memory import RoleMemory
from specs.memory_parts import GIB, MOMENTS, Moment, Part, total
from specs.schema.roles import RoleName
from specs.schema.spec import Spec


@dataclass(frozen=True)
class Place:
    """Devices of the same kind with the same ranks on them: `count` GPUs, or hosts."""

    kind: str  # "GPU" or "host"
    names: tuple[str, ...]
    phases: dict[Moment, dict[str, int]]  # phase → role → bytes
    memory: int  # bytes; 0: not known
    not_known: tuple[RoleName, ...] = ()  # roles here that hold more than `phases` says: their engines do not say it

    def bytes_in(self, phase: Moment) -> int:
        return sum(self.phases[phase].values())

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
    """GPUs and hosts, those with the same ranks on them together."""
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
        memory = gpu_GiB if kind == "GPU" else host_GiB
        here = {tenant.role for tenant in same}
        open_ = tuple(role.role for role in roles if role.not_known and role.role in here)
        yield Place(kind, tuple(_name(place) for place in places), phases, int(memory * GIB), open_)


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
