"""The attention of every role: what is known of it before anything is built, and what cannot be had."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from specs.attention import AttentionFacts, Decision, decide, score_changes
from specs.errors import Problem
from specs.model_facts import model_facts
from specs.schema.engines.engine_table import RolloutTable
from specs.schema.roles import ROLES, RoleName
from specs.schema.spec import Spec
from specs.text import show


@dataclass(frozen=True)
class AtHand:
    """Facts about a role beyond the spec. `versions` None: its interpreter does not answer."""

    config: Mapping[str, Any] = field(default_factory=dict)  # the model's `config.json`
    versions: Mapping[str, str] | None = None  # of the packages in the role's interpreter
    capability: tuple[int, int] | None = None  # of the GPUs


def attention_of(spec: Spec, role: RoleName, at_hand: AtHand | None = None) -> Decision | None:
    """Return what a role's attention will be; None where the role has no model, or one without attention.

    `at_hand` None: by the spec alone. `implementation` is empty where the engine decides or says nothing, and only
    `as_built.json` can say.
    """
    if not ROLES[role].holds_model:
        return None
    section: Any = spec.role(role)
    kind, asked = section.engine.kind, spec.attention(role)
    match section.engine.attention:
        case "none":
            return None
        case "engine":
            return Decision(asked, "", "", f"{kind} chooses its attention itself; as_built.json says what it took")
        case None:
            return Decision(asked, "", "", f"not known: {kind} does not say whether it does what the spec asks")
    return decide(asked, _facts(spec, role, at_hand or AtHand()))


def attention_problems(spec: Spec, look: Callable[[RoleName], Decision | None] | None = None) -> Iterator[Problem]:
    """Attention that cannot be had: by the spec alone, or as `look` decides for a role."""
    named = set()
    # What a trainer says of a key of all roles comes before what the sampler says: it is the wish that counts there.
    for role in [role for role in ROLES if role in spec.roles]:
        found = look(role) if look else attention_of(spec, role)
        key = _key(spec, role)
        if found is not None and found.problem and key not in named:
            named.add(key)
            yield Problem(key, found.problem, found.hint, show(found.asked))


def shadowed_attention(spec: Spec) -> Iterator[Problem]:
    """A wish for all roles that every role overrules."""
    if "attn_implementation" not in spec.model.model_fields_set or spec.actor.engine.attention == "none":
        return
    asking = [role for role in spec.roles if attention_of(spec, role) is not None]
    if not any(_key(spec, role).startswith("model.") and _listens(spec, role) for role in asking):
        message = "has no effect: every role has an attn_implementation of its own, or an engine that chooses it"
        value = show(spec.model.attn_implementation)
        yield Problem("model.attn_implementation", message, "remove the key", value)


def _listens(spec: Spec, role: RoleName) -> bool:
    section: Any = spec.role(role)
    return bool(section.engine.attention != "engine")


def _key(spec: Spec, role: RoleName) -> str:
    """Where the spec says what a role's attention is."""
    written = role if getattr(spec, role) is not None else ROLES[role].inherits
    own = getattr(spec.role(written), "attn_implementation", None)
    return f"{written}.attn_implementation" if own else "model.attn_implementation"


def _facts(spec: Spec, role: RoleName, at_hand: AtHand) -> AttentionFacts:
    section: Any = spec.role(role)
    shape = model_facts(at_hand.config)
    return AttentionFacts(
        device="cuda" if section.devices else "cpu",
        dtype=spec.dtype(role),
        learns=ROLES[role].learns,
        role=role,
        decodes=isinstance(section.engine, RolloutTable),
        versions=at_hand.versions,
        capability=at_hand.capability,
        head_dim=shape.head_dim if shape else 0,
        scores=score_changes(at_hand.config),
    )
