"""Whether a model's heads, widths and experts divide by the tensor-parallel size that the spec asks for.

FSDP2 and ZeRO cut by rows and elements, so any number of ranks will do; samplers cut by heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rlctl.models.model_tensors import tensors_of_config
from specs.errors import Problem
from specs.model_facts import model_facts
from specs.schema.mesh import devices_of_a_process
from specs.schema.spec import Spec
from specs.text import listed, show


def cut_problems(spec: Spec, config: Mapping[str, Any]) -> Iterator[Problem]:
    """What of the model does not divide by `rollout.engine.tensor_parallel`. `config`: a parsed config.json."""
    facts, parts = model_facts(config), devices_of_a_process(spec.rollout)
    if facts is None or parts == 1:
        return
    fitting = [n for n in range(1, facts.heads + 1) if _shares_out(facts.heads, facts.kv_heads, n)]
    inner = int(config.get("moe_intermediate_size") or 0) if facts.experts else facts.intermediate_size
    fitting = [n for n in fitting if inner % n == 0]
    if parts in fitting:
        return
    what = f"the model's {facts.heads} attention heads and {facts.kv_heads} key-value heads"
    if _shares_out(facts.heads, facts.kv_heads, parts):
        what = f"the {inner} columns of the model's MLP"
    hint = f"use {listed(fitting)}"
    yield Problem("rollout.engine.tensor_parallel", f"{what} are not divisible by it", hint, str(parts))


def adapter_problems(spec: Spec, config: Mapping[str, Any]) -> Iterator[Problem]:
    """Names in `actor.lora.targets` that are no linear layer of the model, where its layers are known."""
    known = tensors_of_config(config) if spec.actor.lora else None
    if known is None or spec.actor.lora is None:
        return
    layers = [parameter.name.removesuffix(".weight") for parameter in known.parameters if parameter.linear]
    for name in spec.actor.lora.targets:
        if name not in ("all-linear", "lm_head") and not any(f".{layer}".endswith(f".{name}") for layer in layers):
            last = dict.fromkeys(layer.rpartition(".")[2] for layer in layers)
            message = f"the model has no linear layer {name!r}"
            yield Problem("actor.lora.targets", message, f"it has {', '.join(last)}", show(spec.actor.lora.targets))


def _shares_out(heads: int, kv_heads: int, parts: int) -> bool:
    """Key-value heads are cut, or, where there are more GPUs than heads, repeated."""
    return heads % parts == 0 and (kv_heads % parts == 0 or parts % kv_heads == 0)
