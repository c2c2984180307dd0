"""Rules of the fake engines: all roles or none, and what a numpy model on the CPU has no use for."""

from __future__ import annotations

from collections.abc import Iterator

from specs.engine_tables import FakeRolloutEngine, FakeTrainEngine
from specs.errors import Problem
from specs.explain import show
from specs.rule_parts import no_effect, written_sections
from specs.schema import ModelRole, RoleName, RoleSection, RolloutSection, Spec


def _is_fake(section: RoleSection) -> bool:
    return isinstance(getattr(section, "engine", None), FakeTrainEngine | FakeRolloutEngine)


def fake_problems(spec: Spec) -> Iterator[Problem]:
    """Everything that is wrong with fake engines."""
    held = [(role, section) for role, section in written_sections(spec) if role != "reward"]
    fakes = [role for role, section in held if _is_fake(section)]
    if not fakes:
        return
    for role, section in held:
        if role not in fakes:
            message = f'cannot work with {fakes[0]}.engine.kind = "fake": their models differ'
            kind = getattr(getattr(section, "engine", None), "kind", "")
            yield Problem(f"{role}.engine.kind", message, "use the fake engine for all roles or for none", show(kind))
        else:
            yield from _without_effect_on_fakes(role, section)
    if not spec.model.from_scratch:
        hint = "set model.from_scratch = true"
        yield Problem(
            "model.from_scratch", "the fake engine reads no weights; it always starts from scratch", hint, "false"
        )
    for key in ("attn_implementation", "trust_remote_code"):
        if getattr(spec.model, key) not in ("auto", False):
            yield no_effect(f"model.{key}", spec.model, "the fake engine has no such model")


def _without_effect_on_fakes(role: RoleName, section: RoleSection) -> Iterator[Problem]:
    why = "the fake engine is a numpy model in fp32 on the CPU"
    if section.devices:
        yield no_effect(f"{role}.devices", section, why)
    assert isinstance(section, ModelRole | RolloutSection)
    if section.dtype == "bf16":
        yield no_effect(f"{role}.dtype", section, why)
    if section.attn_implementation is not None:
        yield no_effect(f"{role}.attn_implementation", section, why)
    if getattr(section, "gradient_checkpointing", False):
        yield no_effect(f"{role}.gradient_checkpointing", section, why)
