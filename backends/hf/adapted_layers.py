"""Which layers of a model get LoRA adapters. For the trainer, and for samplers that apply adapters themselves in their
own interpreters."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from backends.hf.score_layer import has_score_layer, score_layer
from specs.errors import ModelError
from specs.model_shapes import is_mixture, takes_adapters

ALL_LINEAR = "all-linear"


def chosen_layers(model: PreTrainedModel, targets: Collection[str]) -> list[str]:
    """Names of the linear layers that `targets` mean, sorted. A target is a layer's name or the end of it. Raises
    ModelError for one that no layer has."""
    head = score_layer(model)[1] if has_score_layer(model) else model.get_output_embeddings()
    mixture = is_mixture(name for name, _ in model.named_parameters())
    linear = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module is not head and takes_adapters(name, mixture=mixture)
    ]
    if ALL_LINEAR in targets:
        return sorted(linear)
    chosen: set[str] = set()
    for target in targets:
        fitting = [name for name in linear if name == target or name.endswith(f".{target}")]
        if not fitting:
            known = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
            raise ModelError(
                f'lora.targets: {type(model).__name__} has no linear layer "{target}" below its head'
                + (" and beside its experts" if mixture else "")
                + " that takes adapters",
                hint=f"it has: {known}",
            )
        chosen.update(fitting)
    return sorted(chosen)


def layer_sizes(model: PreTrainedModel, layer: str) -> tuple[int, int]:
    """Input and output size of a linear layer."""
    held = model.get_submodule(layer)
    rows, columns = held.weight.shape  # type: ignore[misc]
    return (rows, columns) if isinstance(held, Conv1D) else (columns, rows)
