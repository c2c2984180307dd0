"""Which decoder layers compute their activations a second time, in the backward pass (Chen et al. 2016).

It is the first layers that do: when their turn comes on the way back, all that the later ones kept is gone.
"""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from backends.hf.score_layer import backbone
from specs.errors import ModelError


def decoder_layers(model: PreTrainedModel, *, needed: str, hint: str) -> list[nn.Module]:
    """The model's blocks in their order. Raises ModelError for a model that has no list of them; `needed`: what for, as
    the end of a sentence."""
    found = _decoder_layers(model)
    if not found:
        count = model.config.get_text_config().num_hidden_layers
        raise ModelError(f"{type(model).__name__} has no list of its {count} decoder layers, {needed}", hint=hint)
    return found


def _decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    count = model.config.get_text_config().num_hidden_layers
    unsplit = set(model._no_split_modules or ())

    def known_by(layers: list[nn.Module]) -> tuple[bool, bool]:
        """Their number, and their class: a block of LongCat's counts as two layers."""
        return len(layers) == count, {type(layer).__name__ for layer in layers} <= unsplit

    lists = [list(module) for module in backbone(model).modules() if isinstance(module, nn.ModuleList)]
    found = max(filter(None, lists), key=known_by, default=[])
    return found if any(known_by(found)) else []


def recompute_activations(model: PreTrainedModel, chosen: bool | int) -> None:
    """Gradient checkpointing of the first `chosen` layers, True: of all. They need train mode, and what is in them must
    not have it: routers draw noise there. Raises ModelError where the model or a part of its layers cannot."""
    if not model.supports_gradient_checkpointing:
        hint = "set gradient_checkpointing = false for this role"
        raise ModelError(f"{type(model).__name__} does not recompute activations", hint=hint)
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": False})
    for module in model.modules():
        module.training = hasattr(module, "gradient_checkpointing")
    if chosen is True:
        return
    hint = "set gradient_checkpointing = true: all of it is recomputed"
    layers = decoder_layers(model, needed="of which some would be recomputed", hint=hint)
    if chosen > len(layers):
        raise ModelError(
            f"gradient_checkpointing = {chosen}: {type(model).__name__} has {len(layers)} layers",
            hint="set gradient_checkpointing = true for all of them",
        )
    if not all(hasattr(layer, "gradient_checkpointing") for layer in layers):
        raise ModelError(f"layers of {type(model).__name__} cannot be recomputed one by one", hint=hint)
    for layer in layers[chosen:]:
        layer.gradient_checkpointing = False  # type: ignore[assignment]


def recomputed_layers(model: PreTrainedModel) -> int:
    """How many layers would be recomputed now, read back from them."""
    if not any(module.training and getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        return 0
    layers, count = _decoder_layers(model), int(model.config.get_text_config().num_hidden_layers)
    if not all(hasattr(layer, "gradient_checkpointing") for layer in layers):
        return count  # the model's own loop over them decides
    chosen = sum(bool(layer.gradient_checkpointing) for layer in layers)
    return chosen if chosen < len(layers) else count
