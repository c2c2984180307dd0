"""What the spec and the model's `config.json` say that a role's model must be.

`rlctl check-config --probe` and every start of a run compare it with what was built (`rlctl/models/as_built_check.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rlctl.models.gpu import gpu_capability
from rlctl.models.model_tensors import tensors_of_config
from rlctl.models.paths import config_of, resolve_model
from specs.attention import Decision
from specs.model_facts import model_facts
from specs.model_shapes import SCORE_LAYER, ModelTensors
from specs.rules.kernel_rules import kernels_of
from specs.schema.engines.engine_table import TrainTable
from specs.schema.engines.kernel_choice import OWN_MODULES
from specs.schema.engines.library_keys import leaves
from specs.schema.rank_groups import built_mesh
from specs.schema.role_section import Lora
from specs.schema.roles import ROLES, RoleName
from specs.schema.spec import Spec

Expected = Mapping[str, Any]
"""Fields of `ModelBuilt` → the value that they must have. What is left out is not known before the model is built."""


def models_expected(
    spec: Spec, spec_dir: Path, attention: Callable[[Spec, RoleName, Path], Decision | None]
) -> dict[RoleName, Expected]:
    """For every role that holds a model. A hub id is looked up as in `model_folder`. `attention`: what decides a role's
    (`rlctl/preflight/role_attention.py`)."""
    return {
        role: _expected(spec, role, spec_dir, attention(spec, role, spec_dir))
        for role in spec.roles
        if ROLES[role].holds_model
    }


def _expected(spec: Spec, role: RoleName, spec_dir: Path, decision: Decision | None) -> Expected:
    section: Any = spec.role(role)
    path = resolve_model(spec.model_path(role), spec_dir)
    expected: dict[str, Any] = {"path": str(path), "dtype": spec.dtype(role)}
    if (mesh := built_mesh(section)) is not None:
        expected["mesh"] = mesh
    # On another host's GPU, or one that nobody could ask, `auto` may find what was not to be known here.
    known = not section.devices or (section.nodes == 1 and gpu_capability() is not None)
    if decision is not None and decision.implementation and (decision.asked != "auto" or known):
        expected["attn_implementation"] = decision.implementation
        if decision.implementation == "sdpa":
            expected["attn_function"] = decision.function
    if section.engine.attention is None and decision is not None and decision.asked != "auto":
        expected["attn_implementation"] = decision.asked  # whether it does so is not known before
    kernels = kernels_of(spec, role)
    if kernels is not None and (kernels.asked != "auto" or kernels.kernels == OWN_MODULES):
        expected["kernels"] = kernels.kernels
    config = config_of(spec.model_path(role), spec_dir)
    head = ROLES[role].head
    if section.engine.model_of is not None:
        expected["head"] = "lm" if head == "lm" else "score"
    if section.engine.model_of == "bigram":
        return expected | ({"vocab_size": config["vocab_size"]} if "vocab_size" in config else {})
    if section.engine.model_of == "transformers":
        expected |= _shape(config)
        expected["activation_offload"] = getattr(section, "activation_offload", False)
        recomputed = getattr(section, "gradient_checkpointing", False)
        if recomputed is not True:
            expected["recomputed_layers"] = int(recomputed)
        elif "layers" in expected:
            expected["recomputed_layers"] = expected["layers"]
        tensors = tensors_of_config(config)
        if tensors is not None and "tied_embeddings" in expected:
            tensors = tensors if head == "lm" else tensors.with_score_layer(expected["hidden_size"])
            expected["parameters"] = tensors.elements
            expected["trainable_parameters"] = _learning(tensors, section) if ROLES[role].learns else 0
        if head != "lm":
            expected["tied_embeddings"] = False
    if isinstance(section.engine, TrainTable):
        expected |= _options(spec, role, section)
    return expected


def _options(spec: Spec, role: RoleName, section: Any) -> dict[str, Any]:
    """What the engine's library must say that it was told, where it can be asked."""
    device = "cuda" if section.devices else "cpu"
    told = section.engine.library_config(spec.dtype(role), getattr(section, "optimizer", None), device)
    return {"options": dict(leaf for config in told.values() for leaf in leaves(config))} if told else {}


def _shape(config: Mapping[str, Any]) -> dict[str, Any]:
    """What the config says in so many words; what it leaves to the default of its class is left out."""
    facts = model_facts(config)
    if facts is None:
        return {}
    shape: dict[str, Any] = {"hidden_size": facts.hidden_size, "layers": facts.layers}
    if facts.vocab_size:
        shape["vocab_size"] = facts.vocab_size
    if any("tie_word_embeddings" in part for part in (config, config.get("text_config") or {})):
        shape["tied_embeddings"] = facts.tied_embeddings
    return shape


def _learning(tensors: ModelTensors, section: Any) -> int:
    """Elements that the optimizer changes: all, or two matrices beside each adapted one, and a critic's head."""
    lora: Lora | None = getattr(section, "lora", None)
    if lora is None:
        return tensors.elements
    layers = tensors.adaptable
    if "all-linear" not in lora.targets:
        layers = tuple(p for p in layers if _is_target(p.name.removesuffix(".weight"), lora))
    head = sum(p.elements for p in tensors.parameters if p.name == SCORE_LAYER)
    return head + sum(lora.rank * sum(layer.shape) for layer in layers)


def _is_target(name: str, lora: Lora) -> bool:
    return any(name == target or name.endswith(f".{target}") for target in lora.targets)
