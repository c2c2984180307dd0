"""One file per role: the handlers of its verbs."""

from __future__ import annotations

from specs.wire.messages import Verb
from workers.serve import Handlers, typed


def handlers_of(role: object) -> Handlers:
    """Return a role's methods by verb: a rank serves the verbs that it has a method for, of the verb's name."""
    return typed({verb: getattr(role, verb) for verb in Verb if hasattr(role, verb)})
