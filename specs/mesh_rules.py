"""Rules of meshes: what FSDP2 is cut into, and groups of ranks that lie on more than one node."""

from __future__ import annotations

from collections.abc import Iterator

from specs.engine_tables import Fsdp2Engine
from specs.errors import Problem
from specs.explain import listed
from specs.rule_parts import no_effect, written_sections
from specs.schema import RoleName, RoleSection, Spec
from specs.seats import mesh_of, straddling


def mesh_problems(spec: Spec) -> Iterator[Problem]:
    """Meshes that do not fit their role's processes, and FSDP2 keys without effect."""
    for role, section in written_sections(spec):
        engine = getattr(section, "engine", None)
        if not isinstance(engine, Fsdp2Engine):
            continue
        yield from _mesh_size(role, section, engine)
        if engine.offload == "cpu" and not section.devices:
            yield no_effect(f"{role}.engine.offload", engine, f"{role} runs on the CPU")
        if role == "ref" and "sync_every_micro_batch" in engine.model_fields_set:
            yield no_effect(f"{role}.engine.sync_every_micro_batch", engine, "the reference has no gradients")


def _mesh_size(role: RoleName, section: RoleSection, engine: Fsdp2Engine) -> Iterator[Problem]:
    processes, shard, replicate = section.processes, engine.shard, engine.replicate
    if shard is None:
        if processes % replicate:
            message = f"{processes} processes cannot be shared out to {replicate} groups"
            hint = f"{role}.engine.replicate = {listed(_divisors(processes))} would fit"
            yield Problem(f"{role}.engine.replicate", message, hint, str(replicate))
        return
    if shard * replicate == processes:
        return
    message = f"shard × replicate = {shard} × {replicate} = {shard * replicate}, but {role} has {processes} processes"
    fitting = f"{role}.processes = {shard * replicate} would fit"
    if processes % shard == 0:
        fitting += f", or {role}.engine.replicate = {processes // shard}"
    else:
        fitting += f"; {processes} processes take shard = {listed(_divisors(processes))}"
    yield Problem(f"{role}.engine.shard", message, fitting, str(shard))


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def straddling_warnings(spec: Spec) -> Iterator[Problem]:
    """Groups that hold a model together across nodes."""
    for role, section in written_sections(spec):
        groups, mesh = straddling(section), mesh_of(section)
        if not groups or mesh is None:
            continue
        per_node = section.processes // section.nodes
        message = (
            f"{len(groups)} of {mesh.replicate} groups of {mesh.shard} ranks sit on more than one node "
            f"({per_node} processes each), so what is gathered for every layer crosses the network"
        )
        if not isinstance(getattr(section, "engine", None), Fsdp2Engine):
            hint = "fine where the model needs the memory of all; fsdp2 can keep its groups inside a node"
            yield Problem(f"{role}.nodes", message, hint, str(section.nodes))
            continue
        inside = max(n for n in _divisors(per_node) if n <= mesh.shard)
        hint = f"shard = {inside} and replicate = {section.processes // inside} stay inside, if the model fits"
        yield Problem(f"{role}.engine.shard", message, hint, str(mesh.shard))
