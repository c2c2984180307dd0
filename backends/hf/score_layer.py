"""The layer of a sequence-classification model that gives one number for each token: a critic's values, a reward
model's scores."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PretrainedConfig, PreTrainedModel

from specs.errors import ModelError
from specs.schema.roles import HeadKind
from specs.wire.role_config import ModelConfig


def auto_class(head: HeadKind, hf_config: PretrainedConfig, path: str) -> Any:
    """The class of transformers that makes a model with that head. Raises ModelError for a family that has none."""
    made_by: Any = AutoModelForCausalLM if head == "lm" else AutoModelForSequenceClassification
    own_code = getattr(hf_config, "auto_map", None) or {}
    if type(hf_config) not in made_by._model_mapping and made_by.__name__ not in own_code:
        what = "causal-language-model" if head == "lm" else "sequence-classification"
        raise ModelError(
            f"model {path}: transformers {transformers.__version__} has no {what} class for "
            f"{hf_config.model_type} models, so it cannot have a {head} head",
            hint="give the role a model of another family (qwen2, qwen3, llama, gemma3_text, mistral, … have one)",
        )
    return made_by


def backbone(model: PreTrainedModel) -> nn.Module:
    """Return what gives hidden states. (Llama 4's text model names its own by a prefix that it does not have.)"""
    base: nn.Module = model.base_model
    return model.get_submodule("model") if base is model else base


def has_score_layer(model: PreTrainedModel) -> bool:
    """Whether it ends in one number for each token, not in logits."""
    return model.get_output_embeddings() is None


def score_layer(model: PreTrainedModel) -> tuple[str, nn.Linear]:
    """Name and module of the layer behind the backbone. Raises ModelError where the class has more there."""
    behind = [(name, module) for name, module in model.named_children() if module is not backbone(model)]
    found = [(name, module) for name, module in behind if any(True for _ in module.parameters())]
    if len(found) == 1 and isinstance(found[0][1], nn.Linear) and found[0][1].out_features == 1:
        return found[0][0], found[0][1]
    raise ModelError(
        f"{type(model).__name__} has {', '.join(name for name, _ in found) or 'nothing'} after its backbone; a critic "
        "or reward model needs one linear layer with one output there",
        hint="give the role a model of another family (qwen2, qwen3, llama, gemma3_text, mistral, … have one)",
    )


def score_names(model: PreTrainedModel) -> tuple[str, ...]:
    """Names of that layer's weights; none of a language model."""
    if not has_score_layer(model):
        return ()
    name, layer = score_layer(model)
    return tuple(f"{name}.{weight}" for weight, _ in layer.named_parameters())


@torch.no_grad()
def make_score_layer(config: ModelConfig, model: PreTrainedModel) -> None:
    """A new head: of zeros, so that every value is 0 before the first update, whose gradient of the head is not. Raises
    ModelError for a reward model that does not learn: it would say nothing."""
    if config.head == "reward" and not config.learns:
        raise no_score_layer(config.path)
    _, layer = score_layer(model)
    for parameter in layer.parameters():
        parameter.zero_()


def no_score_layer(path: str) -> ModelError:
    return ModelError(
        f"model {path} has no head that gives scores: it would be drawn at random",
        hint="a reward model is a sequence-classification checkpoint with one output (num_labels 1)",
    )


def wrong_score_layer(path: str, name: str, shape: Iterable[int]) -> ModelError:
    return ModelError(
        f"model {path}: its head {name} has shape {list(shape)}; a critic or reward model has one output",
        hint="use a checkpoint with num_labels 1 (one score), or a causal language model, which gets a new value head",
    )
