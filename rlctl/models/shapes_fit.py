"""Whether the shapes of a model fit what the spec asks: parts of a sampler, ranks that share rows, adapters.

FSDP2 and ZeRO cut by rows and elements, so any number of ranks will do; samplers cut by heads, and so does attention
over a shared row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rlctl.models.model_tensors import tensors_of_config
from specs.errors import Problem
from specs.model_facts import model_facts, shares_out, sharing_degrees
from specs.model_shapes import ModelTensors
from specs.schema.rank_groups import devices_of_a_process
from specs.schema.role_section import Lora
from specs.schema.roles import ROLES, RoleName
from specs.schema.spec import Spec
from specs.text import listed, show

_LARGEST_LR, _LARGEST_LR_OF_ADAPTERS, _USUAL_WIDTH = 1e-3, 1e-2, 512
# What adapters are asked for beside the experts of a mixture, by the names that its files have.
_OF_EXPERTS = ("gate_proj", "up_proj", "down_proj", "gate_up_proj", "experts", "w1", "w2", "w3")


def cut_problems(spec: Spec, config: Mapping[str, Any]) -> Iterator[Problem]:
    """What of the model does not divide by `rollout.engine.tensor_parallel`. `config`: a parsed config.json."""
    facts, parts = model_facts(config), devices_of_a_process(spec.rollout)
    if facts is None or parts == 1:
        return
    fitting = sharing_degrees(facts.heads, facts.kv_heads)
    inner = int(config.get("moe_intermediate_size") or 0) if facts.experts else facts.intermediate_size
    fitting = [n for n in fitting if inner % n == 0]
    if parts in fitting:
        return
    what = f"the model's {facts.heads} attention heads and {facts.kv_heads} key-value heads"
    if shares_out(facts.heads, facts.kv_heads, parts):
        what = f"the {inner} columns of the model's MLP"
    hint = f"use {listed(fitting)}"
    yield Problem("rollout.engine.tensor_parallel", f"{what} are not divisible by it", hint, str(parts))


def sequence_problems(key: str, degree: int, config: Mapping[str, Any]) -> Iterator[Problem]:
    """Attention heads that cannot be dealt out to the `degree` ranks that share a row. `key`: of the degree, dotted;
    `config`: a parsed config.json."""
    facts = model_facts(config)
    if facts is None or shares_out(facts.heads, facts.kv_heads, degree):
        return
    what = f"the model's {facts.heads} attention heads and {facts.kv_heads} key-value heads"
    hint = f"use {listed(sharing_degrees(facts.heads, facts.kv_heads))}"
    yield Problem(key, f"{what} cannot be dealt out to so many ranks", hint, str(degree))


def adapter_problems(role: RoleName, lora: Lora, config: Mapping[str, Any]) -> Iterator[Problem]:
    """Names in `lora.targets` of a role that are no linear layer of its model, or one that is the embedding too, and a
    rank above the width of every layer that gets an adapter; where the model's layers are known."""
    known, facts, key = tensors_of_config(config), model_facts(config), f"{role}.lora"
    if known is None or facts is None:
        return
    has_logits = ROLES[role].head == "lm"
    head = [p for p in known.parameters if p.name == "lm_head.weight" and has_logits]
    layers = {parameter.name.removesuffix(".weight"): parameter.shape for parameter in (*known.adaptable, *head)}
    value, chosen = show(lora.targets), set[str]()
    for name in lora.targets:
        found = {layer for layer in layers if f".{layer}".endswith(f".{name}")}
        if name == "lm_head" and facts.tied_embeddings and has_logits:
            message = "lm_head is tied to the embedding, which would get the adapter too"
            yield Problem(f"{key}.targets", message, "leave lm_head out", value)
        elif not found and name != "all-linear":
            message = f"the model has no linear layer {name!r}"
            if name.rpartition(".")[2] in _OF_EXPERTS and _of_experts(known):
                message = f"{name!r} is of the model's experts, which lie in one tensor per layer: no adapter fits"
            hint = f"it has {_last_names(layer for layer in layers if layer != 'lm_head')}"
            yield Problem(f"{key}.targets", message, hint, value)
        chosen |= found if name != "all-linear" else layers.keys() - {"lm_head"}
    widest = max((min(layers[layer]) for layer in chosen), default=0)
    if chosen and lora.rank > widest:
        message = f"above the width of every layer that gets an adapter: the widest has {widest}"
        yield Problem(f"{key}.rank", message, f"use at most {widest}; 8 to 64 are usual", str(lora.rank))


def adapter_warnings(role: RoleName, lora: Lora, config: Mapping[str, Any]) -> Iterator[Problem]:
    """Experts that get no adapters although `lora.targets` means every linear layer."""
    known = tensors_of_config(config)
    if known is None or "all-linear" not in lora.targets:
        return
    if elements := _of_experts(known):
        layers = [parameter.name.removesuffix(".weight") for parameter in known.adaptable]
        share = f"{elements / known.elements:.0%} of the parameters"
        message = f"no adapters for the experts ({share}): they lie in one tensor per layer, not in linear layers"
        hint = f"adapters stand beside {_last_names(layers)}; without {role}.lora the experts learn too"
        yield Problem(f"{role}.lora.targets", message, hint, show(lora.targets))


def rate_warnings(spec: Spec, config: Mapping[str, Any]) -> Iterator[Problem]:
    """A learning rate that a small model bears, and one of usual size does not."""
    facts, lora = model_facts(config), spec.actor.lora
    most = _LARGEST_LR_OF_ADAPTERS if lora is not None else _LARGEST_LR
    lr = spec.actor.optimizer.lr
    if facts is not None and facts.hidden_size >= _USUAL_WIDTH and not spec.model.from_scratch and most < lr <= 0.1:
        message = f"a trained model of width {facts.hidden_size} falls apart above about {most:g}"
        yield Problem("actor.optimizer.lr", message, "1e-6 is usual, with adapters 1e-5", show(lr))


def _of_experts(tensors: ModelTensors) -> int:
    """Parameters that experts hold."""
    return sum(parameter.elements for parameter in tensors.parameters if ".experts." in parameter.name)


def _last_names(layers: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(layer.rpartition(".")[2] for layer in layers))
