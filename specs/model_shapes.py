"""The parameters of a model by name and shape, as memory formulas need them. `rlctl/models/model_tensors.py` finds them
out."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

Shape = tuple[int, ...]


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


@dataclass(frozen=True)
class ModelTensors:
    """All parameters of a causal language model. `source`: where they are known from, in words."""

    parameters: tuple[ParameterShape, ...]
    source: str

    @property
    def elements(self) -> int:
        return sum(parameter.elements for parameter in self.parameters)

    @property
    def largest(self) -> int:
        """Elements of the largest parameter."""
        return max(parameter.elements for parameter in self.parameters)

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
