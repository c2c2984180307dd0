"""A model's attention: what is decided before it is built, and what it then really calls, read back from its layers."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel, modeling_flash_attention_utils
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from specs.attention import FLASH, PACKAGES, AttentionFacts, Decision, decide, score_changes
from specs.errors import ModelError
from specs.interpreters import installed_here
from specs.model_facts import model_facts
from specs.role_config import ModelConfig

# ── before it is built ────────────────────────────────────────────────────────────────────────────


def choose(config: ModelConfig, hf_config: PretrainedConfig, *, decodes: bool = False) -> Decision:
    """What a role's model will be built with in this process, on this device. `decodes`: over the cache of the torch
    rollout engine. Raises ModelError where it cannot be had."""
    values = hf_config.to_dict()
    shape = model_facts(values)
    facts = AttentionFacts(
        device="cuda" if config.device.startswith("cuda") else "cpu",
        dtype=config.computes_in or config.dtype,
        learns=config.learns,
        decodes=decodes,
        versions=installed_here(PACKAGES),
        capability=_capability(config.device),
        head_dim=shape.head_dim if shape else 0,
        scores=score_changes(values),
        not_offered=_not_offered(hf_config),
    )
    decision = decide(config.attn_implementation, facts)
    if decision.problem:
        raise ModelError(f"attn_implementation {decision.asked}: {decision.problem}", hint=decision.hint)
    return decision


def _capability(device: str) -> tuple[int, int] | None:
    return torch.cuda.get_device_capability() if device.startswith("cuda") and torch.cuda.is_available() else None


def _not_offered(hf_config: PretrainedConfig) -> tuple[str, ...]:
    """Implementations that the model's class lacks; none where the class is not transformers' own."""
    if type(hf_config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return ()
    found = MODEL_FOR_CAUSAL_LM_MAPPING[type(hf_config)]
    model_class: type[PreTrainedModel] = found[0] if isinstance(found, tuple) else found
    offers = {
        ("sdpa",): model_class._supports_sdpa,
        FLASH: model_class._supports_flash_attn,
        ("flex_attention",): model_class._supports_flex_attn,
    }
    return tuple(name for names, offered in offers.items() if not offered for name in names)


# ── read back from its layers ─────────────────────────────────────────────────────────────────────


def attention_modules(model: PreTrainedModel) -> Iterator[nn.Module]:
    """Modules that call attention, those of sub-models (a vision tower) too."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if isinstance(config, PretrainedConfig) and "Attention" in type(module).__name__:
            yield module


def in_effect(model: PreTrainedModel) -> tuple[str, ...]:
    """Implementations that the layers are set to, each once, in alphabetical order."""
    found = {str(module.config._attn_implementation) for module in attention_modules(model)}
    return tuple(sorted(found or {str(model.config.get_text_config()._attn_implementation)}))


def functions_called(model: PreTrainedModel) -> tuple[str, ...]:
    """Module and name of every function that the layers really call, each once, in alphabetical order."""
    found = {attention_function(str(m.config._attn_implementation), type(m)) for m in attention_modules(model)}
    return tuple(sorted(found or {attention_function(name) for name in in_effect(model)}))


def attention_function(implementation: str, module_class: type[nn.Module] | None = None) -> str:
    """Module and name of the function that a layer of this class calls; of flash attention, the kernel below it too."""
    if implementation == "eager":  # every model file has its own
        file = sys.modules.get(module_class.__module__) if module_class else None
        function = getattr(file, "eager_attention_forward", None)
        return _name(function) if function is not None else "eager"
    called = _name(ALL_ATTENTION_FUNCTIONS.get_interface(implementation, None))
    kernel = modeling_flash_attention_utils._flash_varlen_fn
    return f"{called} → {_name(kernel)}" if implementation in FLASH and kernel is not None else called


def _name(function: object) -> str:
    module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", type(function).__name__)
    return f"{module}.{name}"


def refuse_a_swap(model: PreTrainedModel, decision: Decision) -> None:
    """transformers replaces what it cannot have, flash_attention_2 by code from the hub for one, with a warning.
    Raises ModelError: nobody asked for that."""
    got = in_effect(model)
    if got != (decision.implementation,):
        raise ModelError(
            f"{type(model).__name__} was to be built with {decision.implementation} attention, but transformers built "
            f"{', '.join(got)}",
            hint="ask for that by name in attn_implementation, or for another that this model has",
        )
