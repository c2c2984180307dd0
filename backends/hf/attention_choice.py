"""A model's attention: the choice before it is built, and the function its layers then call, read back from them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel, modeling_flash_attention_utils
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from backends.packed.packed_attention import eager_function
from specs.attention import FLASH, PACKAGES, AttentionFacts, Decision, decide, score_changes
from specs.errors import ModelError
from specs.model_facts import model_facts
from specs.packages import installed_here
from specs.wire.role_config import ModelConfig

# ── before it is built ────────────────────────────────────────────────────────────────────────────


def choose(config: ModelConfig, hf_config: PretrainedConfig, *, decodes: bool = False) -> Decision:
    """The attention that a role's model gets in this process, on this device. `decodes`: over the cache of the torch
    rollout engine. Raises ModelError if it is not available."""
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
    found: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(hf_config)]
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
    found = {_implementation(module) for module in attention_modules(model)}
    return tuple(sorted(found or {str(model.config.get_text_config()._attn_implementation)}))


def _implementation(attention: nn.Module) -> str:
    assert isinstance(attention.config, PretrainedConfig), "one of `attention_modules`"
    return str(attention.config._attn_implementation)


def functions_called(model: PreTrainedModel) -> tuple[str, ...]:
    """Module and name of every function that the layers really call, each once, in alphabetical order."""
    found = {attention_function(_implementation(m), type(m)) for m in attention_modules(model)}
    return tuple(sorted(found or {attention_function(name) for name in in_effect(model)}))


def attention_function(implementation: str, module_class: type[nn.Module] | None = None) -> str:
    """Module and name of the function that a layer of this class calls; of flash attention, the kernel below it too."""
    if implementation == "eager":  # every model file has its own
        function = eager_function(module_class) if module_class else None
        return _name(function) if function is not None else "eager"
    called = _name(ALL_ATTENTION_FUNCTIONS[implementation])
    kernel = modeling_flash_attention_utils._flash_varlen_fn
    return f"{called} → {_name(kernel)}" if implementation in FLASH and kernel is not None else called


def _name(function: object) -> str:
    module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", type(function).__name__)
    return f"{module}.{name}"


def refuse_own_attention(model: PreTrainedModel, decision: Decision) -> None:
    """Raises ModelError where no code of a model knows transformers' AttentionInterface: the sequences of a packed row
    would see each other. Flash attention is told their lengths."""
    forwards = (inspect.unwrap(type(module).forward) for module in model.modules())
    knows = any("ALL_ATTENTION_FUNCTIONS" in getattr(forward, "__globals__", ()) for forward in forwards)
    if decision.implementation not in FLASH and not knows:
        raise ModelError(
            f"{type(model).__name__} does not call attention through transformers' AttentionInterface, so sequences "
            "cannot be packed",
            hint="name a causal language model whose class does (Qwen, Llama, Gemma, …)",
        )


def refuse_a_swap(model: PreTrainedModel, decision: Decision) -> None:
    """transformers replaces an unavailable attention with only a warning (flash_attention_2 by code from the hub).
    Raises ModelError: the spec did not request that."""
    got = in_effect(model)
    if got != (decision.implementation,):
        raise ModelError(
            f"{type(model).__name__} was to be built with {decision.implementation} attention, but transformers built "
            f"{', '.join(got)}",
            hint="set attn_implementation to that name, or to another that this model supports",
        )
