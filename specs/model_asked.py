"""What a role's model must turn out to be, by the spec and the model's `config.json`: as much of it as they say.

`rlctl check-config --probe` and every start of a run compare it with what was built (`rlctl/as_built.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specs.attention_rules import attention_of, gpu_capability
from specs.model_facts import model_facts
from specs.model_files import config_of, resolve_model
from specs.model_tensors import ModelTensors, tensors_of_config
from specs.schema import Lora, RoleName, Spec
from specs.seats import built_mesh

_OF_TRANSFORMERS = ("ddp", "fsdp2", "zero", "zero3", "torch", "vllm", "sglang")
_SAY_THEIR_MESH = ("ddp", "fsdp2", "zero", "zero3", "torch", "vllm", "fake")

Asked = Mapping[str, Any]
"""Fields of `ModelBuilt` → the value that they must have. What is left out is not known before the model is built."""


def models_asked(spec: Spec, spec_dir: Path) -> dict[RoleName, Asked]:
    """For every role that holds a model. A hub id is looked up as in `model_folder`."""
    return {role: _asked(spec, role, spec_dir) for role in spec.roles if role != "reward"}


def _asked(spec: Spec, role: RoleName, spec_dir: Path) -> Asked:
    section: Any = spec.role(role)
    path = resolve_model(spec.model_path(role), spec_dir)
    dtype = spec.rollout_dtype if role == "rollout" else section.dtype
    asked: dict[str, Any] = {"path": str(path), "dtype": dtype}
    if section.engine.kind in _SAY_THEIR_MESH:
        asked["mesh"] = built_mesh(section)
    decision = attention_of(spec, role, spec_dir)
    # On another host's GPU, or one that nobody could ask, `auto` may find what was not to be known here.
    known = not section.devices or (section.nodes == 1 and gpu_capability() is not None)
    if decision is not None and decision.implementation and (decision.asked != "auto" or known):
        asked["attn_implementation"] = decision.implementation
        if decision.implementation == "sdpa":
            asked["attn_function"] = decision.function
    config = config_of(spec.model_path(role), spec_dir)
    if section.engine.kind == "fake":
        return asked | ({"vocab_size": config["vocab_size"]} if "vocab_size" in config else {})
    if section.engine.kind in _OF_TRANSFORMERS:
        asked |= _shape(config)
        tensors = tensors_of_config(config)
        if tensors is not None and "tied_embeddings" in asked:
            asked["parameters"] = tensors.elements
            asked["trainable_parameters"] = 0 if role != "actor" else _learning(tensors, spec.actor.lora)
    return asked


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


def _learning(tensors: ModelTensors, lora: Lora | None) -> int:
    """Elements that the optimizer changes: all, or two matrices beside each adapted one."""
    if lora is None:
        return tensors.elements
    layers = [p for p in tensors.parameters if p.linear]
    if "all-linear" not in lora.targets:
        layers = [p for p in layers if _is_target(p.name.removesuffix(".weight"), lora)]
    return sum(lora.rank * sum(layer.shape) for layer in layers)


def _is_target(name: str, lora: Lora) -> bool:
    return any(name == target or name.endswith(f".{target}") for target in lora.targets)
