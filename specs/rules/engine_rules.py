"""What engines say is wrong with the sections that they are chosen in, and what their properties rule out."""

from __future__ import annotations

from collections.abc import Iterator

from specs.errors import Problem
from specs.schema.engines.engine_table import RolloutTable, engine_of
from specs.schema.rank_groups import devices_of_a_process
from specs.schema.role_section import RoleSection
from specs.schema.roles import RoleName
from specs.schema.spec import Spec
from specs.text import show


def engine_problems(spec: Spec) -> Iterator[Problem]:
    """Everything that is wrong with an engine and what surrounds it."""
    for role, section in spec.sections():
        engine = engine_of(section)
        if engine is None:
            continue
        asked = getattr(section, "attn_implementation", None)
        if engine.attention == "engine" and asked is not None:
            message = f"has no effect: {engine.kind} chooses its attention itself, by device, dtype and head size"
            hint = "remove the key; as_built.json says what it took"
            yield Problem(f"{role}.attn_implementation", message, hint, show(asked))
        if isinstance(engine, RolloutTable):
            yield from _cut_replicas(role, section, engine)
        yield from engine.problems(spec, role, section)


def engine_warnings(spec: Spec) -> Iterator[Problem]:
    for role, section in spec.sections():
        if (engine := engine_of(section)) is not None:
            yield from engine.warnings(spec, role, section)


def _cut_replicas(role: RoleName, section: RoleSection, engine: RolloutTable) -> Iterator[Problem]:
    each = devices_of_a_process(section)
    key = f"{role}.engine.tensor_parallel"
    if crosses_hosts(section):
        message = (
            f"a replica is on one host, and {role} names {len(section.devices)} GPUs of each: across hosts its engine "
            "would send pickled objects over connections that anybody can open"
        )
        hint = f"use at most {len(section.devices)}, with hosts of its own ({role}.first_node) where the model is tight"
        yield Problem(key, message, hint, str(each))
    if each > 1 and not section.devices and engine.parallel_on_cpu is False:
        message = f"cuts the model across GPUs, and {role} runs on the CPU"
        hint = f"remove the key, or name {each * section.processes} GPUs in {role}.devices"
        yield Problem(key, message, hint, str(each))


def crosses_hosts(section: RoleSection) -> bool:
    """Whether a process is asked to have more GPUs than are named of a host, on several hosts."""
    return section.nodes > 1 and bool(section.devices) and devices_of_a_process(section) > len(section.devices)
