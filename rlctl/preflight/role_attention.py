"""The attention of each role on this machine: the model's config, the role's interpreter and the GPUs are looked at."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rlctl.models.gpu import gpu_capability
from rlctl.models.paths import config_of
from rlctl.preflight.interpreters import packages_of
from specs.attention import Decision
from specs.errors import Problem
from specs.rules.attention_rules import AtHand, attention_of, attention_problems
from specs.schema.roles import ROLES, RoleName
from specs.schema.spec import Spec


def role_attention(spec: Spec, role: RoleName, spec_dir: Path, *, elsewhere: bool = False) -> Decision | None:
    """Return what a role's attention will be (`attention_of`), as far as this machine can tell. `elsewhere`: the run is
    for another one, whose packages and GPUs are not known."""
    return attention_of(spec, role, _at_hand(spec, role, spec_dir, elsewhere))


def role_attention_problems(spec: Spec, spec_dir: Path, *, elsewhere: bool = False) -> Iterator[Problem]:
    """Find attention that cannot be had, by what the spec names on this machine."""
    return attention_problems(spec, lambda role: role_attention(spec, role, spec_dir, elsewhere=elsewhere))


def _at_hand(spec: Spec, role: RoleName, spec_dir: Path, elsewhere: bool) -> AtHand | None:
    """Return what this machine has for the role; None for one without a model."""
    if not ROLES[role].holds_model:
        return None
    section, config = spec.role(role), config_of(spec.model_path(role), spec_dir)
    if elsewhere:
        return AtHand(config)
    return AtHand(
        config,
        versions=packages_of(section, spec_dir),
        capability=gpu_capability() if section.devices and section.nodes == 1 else None,
    )
