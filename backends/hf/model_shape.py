"""Names, dtypes and shapes of a model's weights from its config alone, without memory for them.

For engines that hold the model themselves (vLLM, SGLang), in their own interpreters: uses only what transformers 5.19
and later have in common.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel

from backends.hf.adapted_layers import chosen_layers, layer_sizes
from backends.hf.adapter_names import down_of, up_of, wire_name
from backends.hf.constant_parameters import constants_as_buffers
from backends.hf.tokenizer import own_code_hint, token_ids
from backends.protocol import OnMeta, WeightSpec
from backends.weights.tensor_bytes import DTYPES, named_weights, wire_dtype
from specs.errors import ModelError
from specs.model_facts import model_facts, positions_of, tokens_of_one_rope
from specs.schema.role_section import Lora
from specs.wire.as_built import ModelBuilt
from specs.wire.role_config import ModelConfig


@dataclass(frozen=True)
class ModelShape:
    """Weights by Hugging Face name in the order of the state dict (a tied one once, under its first name)."""

    about: ModelBuilt  # as far as the config says it
    weights: Mapping[str, WeightSpec]
    adapters: Mapping[str, WeightSpec]  # of an engine that applies them itself: A and B of each adapted layer
    carries_state: bool  # in some layers, from token to token
    end_tokens: frozenset[int]  # of config and generation config
    one_rope: int  # tokens up to which positions are rotated in one way; 0: any number


def check_positions(config: ModelConfig, text: PretrainedConfig) -> None:
    """Raises ModelError where a sequence may be longer than the model takes."""
    limit = positions_of(text.to_dict() | {"max_position_embeddings": getattr(text, "max_position_embeddings", None)})
    if limit and config.max_sequence_tokens > limit:
        raise ModelError(
            f"model {config.path} takes at most {limit} tokens, but a sequence may have {config.max_sequence_tokens}",
            hint="lower data.max_prompt_tokens or data.max_response_tokens",
        )


def model_shape(config: ModelConfig, lora: Lora | None = None) -> ModelShape:
    """Raises ModelError where the folder holds no causal language model, one for shorter sequences, or one that lacks a
    layer that `lora` names."""
    try:
        hf_config = AutoConfig.from_pretrained(config.path, trust_remote_code=config.trust_remote_code)
        with torch.device("meta"), constants_as_buffers():
            model = AutoModelForCausalLM.from_config(
                hf_config, dtype=torch.float32, trust_remote_code=config.trust_remote_code
            )
    except (OSError, ValueError, KeyError, ImportError) as error:
        said = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        hint = own_code_hint(error) or "model.path must hold a causal language model"
        raise ModelError(f"model {config.path}: {said}", hint=hint) from None
    for parameter in model.parameters():  # but not buffers, which engines hold in fp32
        parameter.data = parameter.data.to(DTYPES[config.dtype])
    model.tie_weights()
    facts = model_facts(hf_config.to_dict())
    text = hf_config.get_text_config()
    check_positions(config, text)
    weights = {name: weight_spec(name, tensor) for name, tensor in named_weights(model).items()}
    return ModelShape(
        about=ModelBuilt(
            model_class=type(model).__name__,
            path=config.path,
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            trainable_parameters=0,
            hidden_size=text.hidden_size,
            layers=text.num_hidden_layers,
            vocab_size=text.vocab_size,
            dtype=",".join(sorted({spec.dtype for spec in weights.values()})),
            attn_implementation="",
            attn_function="",
            tied_embeddings=model.get_output_embeddings().weight is model.get_input_embeddings().weight,
            weights_checksum="",
        ),
        weights=weights,
        adapters={} if lora is None else _adapters(model, lora, DTYPES[config.dtype]),
        carries_state=facts is not None and facts.state_layers > 0,
        end_tokens=end_tokens(config.path, text.eos_token_id),
        one_rope=tokens_of_one_rope(text.to_dict()),
    )


def _adapters(model: PreTrainedModel, lora: Lora, dtype: torch.dtype) -> dict[str, WeightSpec]:
    specs = {}
    for layer in chosen_layers(model, lora.targets):
        inputs, outputs = layer_sizes(model, layer)
        for name, shape in ((down_of(layer), (lora.rank, inputs)), (up_of(layer), (outputs, lora.rank))):
            specs[wire_name(name)] = weight_spec(wire_name(name), torch.empty(shape, dtype=dtype, device="meta"))
    return specs


def shape_on_meta(config: ModelConfig) -> OnMeta:
    """Describe what an engine that has its own code for the model would build, as far as the model decides it."""
    return OnMeta(model_shape(config).about, not_seen=("attn_implementation", "attn_function", "mesh"))


def weight_spec(name: str, tensor: torch.Tensor) -> WeightSpec:
    """Return the spec of a weight that an engine holds so."""
    return WeightSpec(name, wire_dtype(tensor.dtype), tuple(tensor.shape), tensor.nbytes)


def end_tokens(path: str, own: object) -> frozenset[int]:
    """`eos_token_id` of config (`own`) and generation config; a model built from its config alone lacks the latter."""
    ends = set(token_ids(own))
    with suppress(OSError):  # the file is optional
        ends |= set(token_ids(GenerationConfig.from_pretrained(path).eos_token_id))
    return frozenset(ends)
