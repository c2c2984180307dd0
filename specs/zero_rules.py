"""Rules of the DeepSpeed ZeRO engine: its stage, what it keeps on the host, and its extra keys."""

from __future__ import annotations

from collections.abc import Iterator

from specs.deepspeed_config import deepspeed_problems
from specs.engine_tables import ZeroEngine
from specs.errors import Problem
from specs.explain import show
from specs.schema import ActorSection, RefSection, RoleName, Spec


def zero_problems(spec: Spec) -> Iterator[Problem]:
    """Everything that is wrong with the roles that are held by ZeRO."""
    sections: list[tuple[RoleName, ActorSection | RefSection]] = [("actor", spec.actor)]
    if spec.ref is not None:
        sections.append(("ref", spec.ref))
    for role, section in sections:
        engine = section.engine
        if isinstance(engine, ZeroEngine):
            yield from _stage(role, section, engine)
            yield from _offload(role, section, engine)
            optimizer = section.optimizer if isinstance(section, ActorSection) else None
            device = "cuda" if section.devices else "cpu"
            yield from deepspeed_problems(engine, section.dtype, optimizer, role=role, device=device)


def _stage(role: RoleName, section: ActorSection | RefSection, engine: ZeroEngine) -> Iterator[Problem]:
    key = f"{role}.engine.stage"
    if engine.kind == "zero3" and engine.stage != 3:
        hint = f'remove the key, or write {role}.engine.kind = "zero"'
        yield Problem(key, f'contradicts {role}.engine.kind = "zero3", which means stage 3', hint, str(engine.stage))
    elif isinstance(section, RefSection) and engine.stage != 3:
        message = "cuts what only learning needs, and the reference does not learn"
        yield Problem(key, message, f'use stage 3, or {role}.engine.kind = "ddp"', str(engine.stage))
    elif engine.stage == 1 and section.dtype == "bf16":
        # DeepSpeed has another optimizer for just this, with another layout; stage 2 costs the same traffic or less.
        message = f'does not go with {role}.dtype = "bf16" here'
        yield Problem(key, message, "stage 2 takes less memory for the same result", "1")


def _offload(role: RoleName, section: ActorSection | RefSection, engine: ZeroEngine) -> Iterator[Problem]:
    if engine.offload_parameters and engine.stage != 3:
        message = f"needs stage 3, and {role}.engine.stage is {engine.stage}: below it every rank has all parameters"
        yield Problem(f"{role}.engine.offload_parameters", message, f"set {role}.engine.stage = 3", "true")
    for name in ("offload_optimizer", "offload_parameters"):
        key, value = f"{role}.engine.{name}", getattr(engine, name)
        if value and not section.devices:
            yield Problem(key, f"has no effect: {role} runs on the CPU", "remove the key", show(value))
        elif name == "offload_optimizer" and name in engine.model_fields_set and isinstance(section, RefSection):
            yield Problem(key, "has no effect: the reference does not learn", "remove the key", show(value))
