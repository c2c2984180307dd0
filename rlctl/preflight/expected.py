"""Says what a role's model must be, by the spec and the model's `config.json`.

`rlctl check-config --probe` and every start of a run compare it with what was built (`rlctl/models/as_built_check.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlctl.models.as_built_check import Expected
from rlctl.models.hardware import gpu_capability
from rlctl.models.model_tensors import tensors_of_config
from rlctl.models.paths import config_of, resolve_model
from rlctl.preflight.role_choices import role_attention
from specs.attention import Decision
from specs.model_facts import merged_config, model_facts
from specs.rules.attention_rules import kernels_of
from specs.schema.engines.engine_table import TrainTable
from specs.schema.engines.held_model import elements, trained
from specs.schema.engines.kernel_choice import OWN_MODULES
from specs.schema.engines.library_keys import leaves
from specs.schema.rank_groups import built_mesh
from specs.schema.roles import ROLES, RoleName
from specs.schema.spec import Spec


def models_expected(spec: Spec, spec_dir: Path) -> dict[RoleName, Expected]:
    """Return what is expected of every role that holds a model. A hub id is looked up as in `model_folder`."""
    return {role: _expected(spec, role, spec_dir) for role in spec.roles if ROLES[role].holds_model}


def _expected(spec: Spec, role: RoleName, spec_dir: Path) -> Expected:
    section: Any = spec.role(role)
    expected: dict[str, Any] = {"path": str(resolve_model(spec.model_path(role), spec_dir)), "dtype": spec.dtype(role)}
    if (mesh := built_mesh(section)) is not None:
        expected["mesh"] = mesh
    if (decision := role_attention(spec, role, spec_dir)) is not None:
        expected |= _attention(section, decision)
    kernels = kernels_of(spec, role)
    if kernels is not None and (kernels.asked != "auto" or kernels.implementation == OWN_MODULES):
        expected["kernels"] = kernels.implementation
    config, head = config_of(spec.model_path(role), spec_dir), ROLES[role].head
    if section.engine.model_of is not None:
        expected["head"] = "lm" if head == "lm" else "score"
    if section.engine.model_of == "bigram":
        return expected | ({"vocab_size": config["vocab_size"]} if "vocab_size" in config else {})
    if section.engine.model_of == "transformers":
        expected |= _model(spec, role, section, config)
    if isinstance(section.engine, TrainTable):
        device = "cuda" if section.devices else "cpu"
        asked = section.engine.library_config(spec.dtype(role), getattr(section, "optimizer", None), device)
        if asked:
            expected["options"] = dict(leaf for part in asked.values() for leaf in leaves(part))
    return expected


def _attention(section: Any, decision: Decision) -> dict[str, Any]:
    """Return what is certain of a role's attention. On another host's GPU, or one that nobody could ask, `auto` may
    find what was not to be known here."""
    known = not section.devices or (section.nodes == 1 and gpu_capability(section.devices) is not None)
    found: dict[str, Any] = {}
    if decision.implementation and (decision.asked != "auto" or known):
        found["attn_implementation"] = decision.implementation
        if decision.implementation == "sdpa":
            found["attn_function"] = decision.function
    if section.engine.attention is None and decision.asked != "auto":
        found["attn_implementation"] = decision.asked  # whether it does so is not known before
    return found


def _model(spec: Spec, role: RoleName, section: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a config says of a model of transformers; what it leaves to the default of its class is left out."""
    facts, tensors, head = model_facts(config), tensors_of_config(config), ROLES[role].head
    found: dict[str, Any] = {"activation_offload": getattr(section, "activation_offload", False)}
    recomputed = getattr(section, "gradient_checkpointing", False)
    if recomputed is not True:
        found["recomputed_layers"] = int(recomputed)
    if head != "lm":
        found["tied_embeddings"] = False
    if facts is None:
        return found
    found |= {"hidden_size": facts.hidden_size, "layers": facts.layers}
    found |= {"vocab_size": facts.vocab_size} if facts.vocab_size else {}
    found |= {"recomputed_layers": facts.layers} if recomputed is True else {}
    if "tie_word_embeddings" not in merged_config(config):
        return found
    if tensors is not None:
        tensors = tensors if head == "lm" else tensors.with_score_layer(facts.hidden_size)
        learning = trained(tensors, getattr(section, "lora", None)) if spec.learns(role) else ()
        found |= {"parameters": tensors.elements, "trainable_parameters": elements(learning)}
    return {"tied_embeddings": facts.tied_embeddings, **found}
