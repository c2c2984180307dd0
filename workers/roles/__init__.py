"""One file per role: the handlers of its verbs."""

from __future__ import annotations

from specs.wire.messages import Verb
from workers.serve import TypedHandler


def methods_of(role: object) -> dict[Verb, TypedHandler]:
    """Return a role's methods by verb: a rank serves the verbs that it has a method for, of the verb's name."""
    return {verb: getattr(role, verb) for verb in Verb if hasattr(role, verb)}
