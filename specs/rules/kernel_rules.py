"""The kernels of every trained model: what is known of them before anything is built, and what cannot be had."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from specs.errors import Problem
from specs.schema.engines.engine_table import engine_of
from specs.schema.engines.kernel_choice import KernelChoice, KernelFacts, choose_kernels
from specs.schema.engines.transformers_tables import OwnModules
from specs.schema.roles import RoleName
from specs.schema.spec import Spec
from specs.text import show


def kernels_of(spec: Spec, role: RoleName, at_hand: KernelFacts | None = None) -> KernelChoice | None:
    """Return what a role's modules compute with; None where its engine does not run transformers' own. `at_hand` None:
    by the spec alone."""
    section = spec.role(role)
    engine = engine_of(section)
    if not isinstance(engine, OwnModules):
        return None
    by_spec = KernelFacts("cuda" if section.devices else "cpu", role)
    return choose_kernels(engine.kernels, at_hand or by_spec)


def kernel_problems(spec: Spec, look: Callable[[RoleName], KernelChoice | None] | None = None) -> Iterator[Problem]:
    """Kernels that cannot be had: by the spec alone, or as `look` decides for a role."""
    written = {role for role, _ in spec.sections()}
    for role in [role for role in spec.roles if role in written]:
        found = look(role) if look else kernels_of(spec, role)
        if found is not None and found.problem:
            yield Problem(f"{role}.engine.kernels", found.problem, found.hint, show(found.asked))
