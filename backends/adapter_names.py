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


def peft_name(adapter: str) -> str:
    """The name in `adapter_model.safetensors`, as `PeftModel.from_pretrained` reads it."""
    return "base_model.model." + adapter.replace(".default.", ".")
