"""Rules of engines: their own, and those that their properties imply."""

from __future__ import annotations

from collections.abc import Iterator

from specs.errors import Problem
from specs.schema.engines.engine_table import EngineContext, RolloutTable, engine_of
from specs.schema.rank_groups import devices_of_a_process
from specs.schema.role_section import RoleSection
from specs.schema.roles import ROLES, RoleName
from specs.schema.spec import Spec
from specs.text import show


def engine_problems(spec: Spec) -> Iterator[Problem]:
    """Find everything that is wrong with an engine and what surrounds it."""
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
        yield from engine.problems(engine_context(spec, role, section))


def engine_context(spec: Spec, role: RoleName, section: RoleSection) -> EngineContext:
    """Return what the engine of a role may look at."""
    engines = {name: engine_of(other) for name, other in spec.sections() if ROLES[name].holds_model}
    return EngineContext(
        role=role,
        section=section,
        dtype=getattr(section, "dtype", None) or spec.actor.dtype,
        model=spec.model,
        engines={name: engine for name, engine in engines.items() if engine is not None},
        max_prompt_tokens=spec.data.max_prompt_tokens,
        evaluations=spec.evaluations,
        actor_lora=spec.actor.lora,
    )


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
    """Return whether a process of a role on several hosts asks for more GPUs than are named of each."""
    return section.nodes > 1 and bool(section.devices) and devices_of_a_process(section) > len(section.devices)
