"""What the rules share: the sections that a person wrote, and the words for a key without effect."""

from __future__ import annotations

from specs.errors import Problem
from specs.explain import show
from specs.schema import RoleName, RoleSection, Spec
from specs.table import Table


def no_effect(key: str, table: Table, why: str) -> Problem:
    """The problem of a key of `table` that does nothing under what else is chosen."""
    name = key.rpartition(".")[2]
    return Problem(key, f"has no effect: {why}", "remove the key", show(getattr(table, name)))


def written_sections(spec: Spec) -> list[tuple[RoleName, RoleSection]]:
    """Sections as the person wrote them: a reference shaped like the actor is not one of them."""
    sections: list[tuple[RoleName, RoleSection]] = [("actor", spec.actor)]
    if spec.ref is not None:
        sections.append(("ref", spec.ref))
    return [*sections, ("rollout", spec.rollout), ("reward", spec.reward)]
