"""The kernels of each role on this machine, by its interpreter and devices."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from rlctl.preflight.interpreters import own_path, packages_of
from specs.errors import Problem
from specs.rules.kernel_rules import kernel_problems, kernels_of
from specs.schema.engines.kernel_choice import OWN_MODULES, KernelChoice, KernelFacts
from specs.schema.roles import ROLES, RoleName
from specs.schema.spec import Spec


def role_kernels(spec: Spec, role: RoleName, spec_dir: Path, *, elsewhere: bool = False) -> KernelChoice | None:
    """Return what a role's modules will compute with (`kernels_of`), as far as this machine can tell. `elsewhere`: the
    run is for another one, whose packages are not known."""
    found = kernels_of(spec, role) if ROLES[role].is_trainer else None
    if found is None or found.asked == OWN_MODULES or found.problem:
        return found
    section = spec.role(role)
    facts = KernelFacts(
        device="cuda" if section.devices else "cpu",
        role=role,
        versions=None if elsewhere else packages_of(section, spec_dir),
        interpreter=own_path(section, spec_dir) or sys.executable,
    )
    return kernels_of(spec, role, facts)


def role_kernel_problems(spec: Spec, spec_dir: Path) -> Iterator[Problem]:
    """Find kernels that cannot be had, by what the spec names on this machine."""
    return kernel_problems(spec, lambda role: role_kernels(spec, role, spec_dir))
