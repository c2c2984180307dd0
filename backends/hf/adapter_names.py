"""Names of weights in a model with LoRA adapters, as peft gives them.

A layer `q_proj` becomes `q_proj.base_layer`, beside it stand `q_proj.lora_A.default` and `q_proj.lora_B.default`.
"""

from __future__ import annotations

_BASE = ".base_layer."
_DOWN, _UP = ".lora_A.default.weight", ".lora_B.default.weight"


def is_adapter(name: str) -> bool:
    return name.endswith((_DOWN, _UP))


def base_name(name: str) -> str:
    """The weight's name in the model without adapters."""
    return name.replace(_BASE, ".")


def layer_of(adapter: str) -> str:
    """The adapted layer's name, from that of one of its adapter's weights."""
    return adapter.removesuffix(_DOWN).removesuffix(_UP)


def is_down(adapter: str) -> bool:
    """Whether this is A [rank, in], which comes before B [out, rank]."""
    return adapter.endswith(_DOWN)


def down_of(layer: str) -> str:
    return layer + _DOWN


def up_of(layer: str) -> str:
    return layer + _UP


def wire_name(adapter: str) -> str:
    """Its name on the wire: `….q_proj.lora_A.weight`."""
    return adapter.replace(".default.", ".")


def is_on_the_wire(name: str) -> bool:
    """Whether a weight on the wire belongs to an adapter."""
    return name.endswith((wire_name(_DOWN), wire_name(_UP)))


def place_of(wire: str) -> tuple[str, bool]:
    """The adapted layer's name, and whether this is its A, from the name of an adapter's weight that travels."""
    down = wire_name(_DOWN)
    return wire.removesuffix(down).removesuffix(wire_name(_UP)), wire.endswith(down)


def peft_name(adapter: str) -> str:
    """The name in `adapter_model.safetensors`, as `PeftModel.from_pretrained` reads it."""
    return "base_model.model." + wire_name(adapter)
