"""What Hugging Face says of the model: weights by name, end tokens. Read without weights, by whichever transformers the
role's interpreter has."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PretrainedConfig

from backends.protocol import WeightSpec
from backends.stops import token_ids
from backends.tensors import DTYPES, named_weights, wire_dtype
from specs.errors import ModelError
from specs.role_config import ModelConfig


@dataclass(frozen=True)
class HfModel:
    """A causal language model as transformers would build it."""

    architecture: str  # class name
    weights: dict[str, WeightSpec]  # by name; a tied one once, under its first name
    end_tokens: frozenset[int]


def read_model(config: ModelConfig) -> HfModel:
    """Raises ModelError when `config.json` is missing or unfit."""
    try:
        hf_config = AutoConfig.from_pretrained(config.path, trust_remote_code=config.trust_remote_code)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                hf_config, dtype=DTYPES[config.dtype], trust_remote_code=config.trust_remote_code
            )
    except (OSError, ValueError, KeyError, ImportError) as error:
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(
            f"model {config.path}: {said}", hint="model.path must be a folder with config.json, or the id of a model"
        ) from None
    text = hf_config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None)
    if limit is not None and config.max_sequence_tokens > limit:
        raise ModelError(
            f"model {config.path} takes at most {limit} tokens, but a sequence may have {config.max_sequence_tokens}",
            hint="lower data.max_prompt_tokens or data.max_response_tokens",
        )
    weights = {
        name: WeightSpec(name, wire_dtype(tensor.dtype), tuple(tensor.shape), tensor.nbytes)
        for name, tensor in named_weights(model).items()
    }
    return HfModel(type(model).__name__, weights, frozenset(_end_tokens(text, config.path)))


def _end_tokens(text: PretrainedConfig, path: str) -> set[int]:
    """`eos_token_id` of config and generation config."""
    named = set(token_ids(text.eos_token_id))
    with suppress(OSError):  # the file is optional
        named |= set(token_ids(GenerationConfig.from_pretrained(path).eos_token_id))
    return named
