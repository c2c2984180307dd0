"""The attention and the kernels of every role, as the spec and what is at hand decide them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from specs.attention import AttentionFacts, Decision, decide, score_changes
from specs.errors import Problem
from specs.model_facts import model_facts
from specs.schema.engines.engine_table import RolloutTable, engine_of
from specs.schema.engines.kernel_choice import choose_kernels
from specs.schema.engines.transformers_tables import OwnModules
from specs.schema.roles import ROLES, RoleName
from specs.schema.spec import Spec
from specs.schema.table import no_effect


@dataclass(frozen=True)
class AtHand:
    """Facts about a role beyond the spec. `versions` None: its interpreter does not answer."""

    config: Mapping[str, Any] = field(default_factory=dict)  # the model's `config.json`
    versions: Mapping[str, str] | None = None  # of the packages in the role's interpreter
    capability: tuple[int, int] | None = None  # of the GPUs
    interpreter: str = ""  # its path, for hints


def attention_of(spec: Spec, role: RoleName, at_hand: AtHand = AtHand()) -> Decision | None:
    """Return what a role's attention will be; None where the role has no model, or one without attention.
    `implementation` is empty where the engine decides or says nothing, and only `as_built.json` can say."""
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
    shape = model_facts(at_hand.config)
    facts = AttentionFacts(
        device="cuda" if section.devices else "cpu",
        dtype=spec.dtype(role),
        learns=spec.learns(role),
        role=role,
        decodes=isinstance(section.engine, RolloutTable),
        versions=at_hand.versions,
        capability=at_hand.capability,
        head_dim=shape.head_dim if shape else 0,
        scores=score_changes(at_hand.config),
    )
    return decide(asked, facts)


def kernels_of(spec: Spec, role: RoleName, at_hand: AtHand = AtHand()) -> Decision | None:
    """Return what a role's modules compute with; None where its engine does not run transformers' own."""
    section = spec.role(role)
    engine = engine_of(section)
    if not isinstance(engine, OwnModules):
        return None
    on_gpu, interpreter = bool(section.devices), at_hand.interpreter or "python"
    return choose_kernels(engine.kernels, on_gpu=on_gpu, versions=at_hand.versions, role=role, interpreter=interpreter)


def attention_key(spec: Spec, role: RoleName) -> str:
    """Return the key that says what a role's attention is."""
    written = role if getattr(spec, role, None) is not None else ROLES[role].inherits or role
    own = getattr(spec.role(written), "attn_implementation", None)
    return f"{written}.attn_implementation" if own else "model.attn_implementation"


def shadowed_attention(spec: Spec) -> Iterator[Problem]:
    """Yield the attention of all roles where every role has its own."""
    lead = engine_of(spec.lead_section)
    if "attn_implementation" not in spec.model.model_fields_set or (lead is not None and lead.attention == "none"):
        return
    for role in [role for role in spec.roles if attention_of(spec, role) is not None]:
        engine = engine_of(spec.role(role))
        if engine is not None and engine.attention != "engine" and attention_key(spec, role).startswith("model."):
            return
    why = "every role has an attn_implementation of its own, or an engine that chooses it"
    yield no_effect("model.attn_implementation", why)
