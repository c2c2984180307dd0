"""Holds the parameters of a model by name and shape, as `rlctl/models/model_tensors.py` finds them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from math import prod

Shape = tuple[int, ...]
LM_HEADS = ("lm_head.weight", "lm_head.bias")
SCORE_LAYER = "score.weight"
PART_NAMES = {
    "model.language_model.": "model.",
    "model.text_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
"""How names of a language model's weights begin in a folder that holds more → how they do where it is alone."""

_MIXTURES = {
    r"\.block_sparse_moe\.(?=gate\.|experts\.|e_score)": ".mlp.",  # Mixtral, MiniMax
    r"(\.block_sparse_moe)\.input_linear\.weight$": r"\1.experts.gate_up_proj",  # Granite
    r"(\.block_sparse_moe)\.output_linear\.weight$": r"\1.experts.down_proj",
    r"(\.block_sparse_moe\.router)\.layer\.": r"\1.",
    r"\.mlp\.moe_statics\.": ".mlp.gate.moe_statics.",  # Ernie
}
"""Names of routers and experts in files of mixtures → those that transformers builds."""


@dataclass(frozen=True)
class ParameterShape:
    """One parameter; a tied one once, under its first name. `linear`: the weight of a linear layer, [out, in]."""

    name: str
    shape: Shape
    layer: int | None = None  # of the decoder; None: outside its layers
    linear: bool = False

    @property
    def elements(self) -> int:
        return prod(self.shape)


def language_model_names(names: Collection[str]) -> dict[str, str]:
    """Return names of a folder's weights → what they are where the language model is alone; those of others are left
    out."""
    renamed = {
        name: own + name.removeprefix(prefix)
        for name in names
        for prefix, own in PART_NAMES.items()
        if name.startswith(prefix)
    }
    return {name: name for name in names if not renamed or name in LM_HEADS} | renamed


def built_names(names: Collection[str]) -> dict[str, str]:
    """Return the same, with routers and experts named as transformers builds them."""
    built = language_model_names(names)
    for pattern, own in _MIXTURES.items():
        built = {name: re.sub(pattern, own, before) for name, before in built.items()}
    return built


def takes_adapters(layer: str, *, mixture: bool) -> bool:
    """Whether LoRA may stand beside a linear layer. Not beside the last one of a Mamba layer: its kernels read the
    weight past an adapter, and peft refuses. In a mixture of experts not in its MLPs: the experts are no linear layers,
    a router may return more than a tensor, and peft takes the names of its dense layers for theirs. `mixture`:
    `is_mixture` of the model."""
    if f".{layer.removesuffix('.weight')}".endswith((".mamba.out_proj", ".mixer.out_proj")):
        return False
    return not mixture or not any(part in layer for part in (".mlp.", ".mlps.", ".feed_forward.", ".experts."))


def is_mixture(parameters: Iterable[str]) -> bool:
    """Whether it is a mixture of experts, by the names of its parameters."""
    return any(".experts." in name for name in parameters)


@dataclass(frozen=True)
class ModelTensors:
    """All parameters of a causal language model, or of what `with_score_layer` makes of it. `source`: where they are
    known from, in words."""

    parameters: tuple[ParameterShape, ...]
    source: str

    def with_score_layer(self, hidden_size: int) -> ModelTensors:
        """Return the parameters of the same backbone with one number for each token in place of the logits."""
        kept = (p for p in self.parameters if p.name not in (*LM_HEADS, SCORE_LAYER))
        return replace(self, parameters=(*kept, ParameterShape(SCORE_LAYER, (1, hidden_size))))

    @property
    def elements(self) -> int:
        return sum(parameter.elements for parameter in self.parameters)

    @property
    def adaptable(self) -> tuple[ParameterShape, ...]:
        """Weights of the linear layers below the head that LoRA may stand beside."""
        mixture = is_mixture(parameter.name for parameter in self.parameters)
        return tuple(p for p in self.parameters if p.linear and takes_adapters(p.name, mixture=mixture))

    @property
    def largest(self) -> int:
        """Elements of the largest parameter."""
        return max(parameter.elements for parameter in self.parameters)

    @property
    def norms_heads(self) -> bool:
        """Whether queries and keys are normed."""
        return any(parameter.name.endswith("q_norm.weight") for parameter in self.parameters)

    def of_layer(self, layer: int | None) -> tuple[ParameterShape, ...]:
        return tuple(parameter for parameter in self.parameters if parameter.layer == layer)

    @property
    def largest_layer(self) -> int:
        """Elements of the largest decoder layer; 0 where layers are not known."""
        layers = {parameter.layer for parameter in self.parameters if parameter.layer is not None}
        return max((sum(p.elements for p in self.of_layer(layer)) for layer in layers), default=0)

    @property
    def outside_layers(self) -> int:
        """Elements of embeddings, last norm and head."""
        return sum(parameter.elements for parameter in self.of_layer(None))
