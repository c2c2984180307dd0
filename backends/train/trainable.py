"""Builds a trainer's model in the engine's precision, with adapters, and freezes what does not learn.

Engines build it with memory or without; a look at what would be built (`TrainEngine.on_meta`) takes the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel

from backends.hf.recompute import recompute_activations
from backends.train.hf_weights import aliases_of
from backends.train.lora import Adapters
from specs.schema.role_section import DType
from specs.wire.role_config import ModelConfig, TrainConfig

Make = Callable[[ModelConfig], PreTrainedModel]


@dataclass(frozen=True)
class HeldModel:
    """`aliases`: those of the model before it got adapters, which is what the files on disk know."""

    model: PreTrainedModel
    aliases: Mapping[str, Sequence[str]]
    adapters: Adapters | None


def hold_model(config: TrainConfig, dtype: DType, make: Make) -> HeldModel:
    """Build with `make`, holding weights in `dtype`, and mark what learns. Raises ModelError."""
    computes = {"computes_in": config.model.dtype, "learns": config.optimizer is not None}
    model = make(config.model.model_copy(update={"dtype": dtype, **computes}))
    if config.optimizer is None:
        model.requires_grad_(False)
    aliases = aliases_of(model)
    adapters = None
    if config.lora is not None:
        adapters = Adapters(model, config.lora, seed=config.model.seed, path=config.model.path)
    if config.gradient_checkpointing:
        recompute_activations(model, config.gradient_checkpointing)
    return HeldModel(model, aliases, adapters)
