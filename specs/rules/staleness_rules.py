"""Rules of sampling ahead of learning (`rollout.max_staleness`)."""

from __future__ import annotations

from collections.abc import Iterator

from specs.errors import Problem
from specs.schema.roles import ROLES, ROLLOUT
from specs.schema.spec import Spec
from specs.text import show

_KEY = "rollout.max_staleness"


def run_ahead_problems(spec: Spec) -> Iterator[Problem]:
    """Roles that take turns, or share a GPU, cannot work at the same time."""
    most = spec.rollout.max_staleness
    if not most:
        return
    if spec.run.colocate == "always":
        message = 'samples while the actor learns, and with run.colocate = "always" the two take turns'
        yield Problem(_KEY, message, f"set {_KEY} = 0, or leave run.colocate out", show(most))
        return
    for role in [role for role in ROLES if role in spec.roles and ROLES[role].is_trainer]:
        shared = sorted({number for _, number in spec.gpus(role) & spec.gpus(ROLLOUT)})
        if shared:
            message = (
                f"samples while the actor learns, and rollout shares GPU {', '.join(map(str, shared))} with {role}"
            )
            yield Problem(_KEY, message, f"give rollout.devices GPUs of its own, or set {_KEY} = 0", show(most))
