"""The attention and the kernels of each role on this machine, by its model, its interpreter and its devices."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from rlctl.models.hardware import gpu_capability
from rlctl.models.paths import config_of
from rlctl.preflight.interpreters import own_path, packages_of
from specs.attention import Decision
from specs.errors import Problem
from specs.rules.attention_rules import AtHand, attention_key, attention_of, kernels_of
from specs.schema.roles import ROLES, RoleName
from specs.schema.spec import Spec


def role_attention(spec: Spec, role: RoleName, spec_dir: Path, *, elsewhere: bool = False) -> Decision | None:
    """Return what a role's attention will be (`attention_of`), as far as this machine can tell. `elsewhere`: the run is
    for another one, whose packages and GPUs are not known."""
    return attention_of(spec, role, _at_hand(spec, role, spec_dir, elsewhere)) if ROLES[role].holds_model else None


def role_kernels(spec: Spec, role: RoleName, spec_dir: Path, *, elsewhere: bool = False) -> Decision | None:
    """Return what a role's modules will compute with (`kernels_of`), as far as this machine can tell."""
    return kernels_of(spec, role, _at_hand(spec, role, spec_dir, elsewhere)) if ROLES[role].is_trainer else None


def _at_hand(spec: Spec, role: RoleName, spec_dir: Path, elsewhere: bool) -> AtHand:
    section, config = spec.role(role), config_of(spec.model_path(role), spec_dir)
    if elsewhere:
        return AtHand(config)
    capability = gpu_capability(section.devices) if section.nodes == 1 else None
    return AtHand(config, packages_of(section, spec_dir), capability, own_path(section, spec_dir) or sys.executable)


def choice_problems(spec: Spec, spec_dir: Path, *, elsewhere: bool = False) -> Iterator[Problem]:
    """Yield attention and kernels that a role asks for and cannot have."""
    named = set()
    # A trainer's problem with a key of all roles comes before the sampler's: it is the wish that counts there.
    for role in [role for role in ROLES if role in spec.roles]:
        key, found = attention_key(spec, role), role_attention(spec, role, spec_dir, elsewhere=elsewhere)
        if found is not None and found.problem and key not in named:
            named.add(key)
            yield Problem(key, found.problem, found.hint)
    for role, section in spec.sections():
        is_auto = bool(section.devices) and getattr(section, "dtype", None) == "auto" and not elsewhere
        capability = gpu_capability(section.devices) if is_auto and section.nodes == 1 else None
        if capability is not None and capability < (8, 0):
            message = "auto is bf16 on GPUs, and those of this machine do not compute in it"
            yield Problem(f"{role}.dtype", message, f'set {role}.dtype = "fp32"', '"auto"')
        kernels = role_kernels(spec, role, spec_dir, elsewhere=elsewhere) if role in spec.roles else None
        if kernels is not None and kernels.problem:
            yield Problem(f"{role}.engine.kernels", kernels.problem, kernels.hint)
