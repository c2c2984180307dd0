"""Compare what `rlctl plan` said of a run's roles with the most that their ranks have held: `memory.json`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TypedDict

from rlctl.memory.memory_plan import plan_memory
from rlctl.models.hardware import gpu_memory_GiB
from rlctl.processes.group import Group
from specs.errors import SpecError
from specs.json_file import write_object
from specs.memory_parts import GIB
from specs.schema.spec import Spec

FILE = "memory.json"


class Compared(TypedDict):
    """GiB of the rank that held most, without what a process holds before it builds its model."""

    planned_GiB: float
    used_GiB: float


def compare(spec: Spec, spec_dir: Path, groups: Mapping[str, Group]) -> dict[str, Compared]:
    """Return the roles that can be planned on this machine and whose ranks reported what they held. (A server beside
    the role's process, as SGLang's, does not.)"""
    gpus = any(spec.role(role).devices for role in spec.roles)
    try:
        plan = plan_memory(spec, spec_dir, gpu_GiB=gpu_memory_GiB()[0] if gpus else 0.0, host_GiB=0.0)
    except SpecError:
        return {}
    return {
        role.role: {"planned_GiB": role.measurable_bytes / GIB, "used_GiB": groups[role.role].used_GiB}
        for role in plan.roles
        if not role.not_known and groups[role.role].used_GiB > 0
    }


def write(compared: Mapping[str, Compared], run_dir: Path) -> None:
    """Write `memory.json`, or nothing where the disk refuses: the error that a person must see is the run's own."""
    with suppress(OSError):
        write_object(run_dir / FILE, compared)


def line(compared: Mapping[str, Compared]) -> str:
    """Return `actor 0.31 GiB (planned 0.29), rollout …`."""
    return ", ".join(f"{role} {c['used_GiB']:.2f} GiB (planned {c['planned_GiB']:.2f})" for role, c in compared.items())
