"""The language model of a folder that holds more, such as a vision tower: it trains, and the rest stays as it is."""

from __future__ import annotations

from typing import Any

import transformers
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig

from specs.errors import ModelError
from specs.model_shapes import PART_NAMES

KEY_MAPPING = {rf"^{prefix.replace('.', chr(92) + '.')}": own for prefix, own in PART_NAMES.items()}
"""For `from_pretrained` of the language model's class."""


def is_composite(hf_config: PretrainedConfig) -> bool:
    """Return whether a config describes several models. One with code of its own is left to that."""
    return hf_config.get_text_config() is not hf_config and not getattr(hf_config, "auto_map", None)


def language_model_config(hf_config: PretrainedConfig, path: str) -> PretrainedConfig:
    """Return the config of the language model; the same one where there is nothing else. Raises ModelError for a family
    whose language model has no class of its own."""
    if not is_composite(hf_config):
        return hf_config
    text = hf_config.get_text_config()
    if type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(
            f"model {path}: transformers {transformers.__version__} has no class for the language model alone "
            f"({text.model_type}) of {hf_config.model_type}",
            hint="name a model of another family (qwen3_5, gemma3, mistral3, llama4, … have one)",
        )
    if "tie_word_embeddings" in PretrainedConfig.get_config_dict(path)[0]:  # else the whole's default may not be true
        text.tie_word_embeddings = hf_config.tie_word_embeddings
    return text


def class_of_folder(hf_config: PretrainedConfig) -> Any:
    """Return the class that a folder of several models says it is of."""
    names = hf_config.architectures or [""]
    return getattr(transformers, names[0])
