"""Compare the shapes of a model with what the spec asks: parts of a sampler, ranks that share rows, adapters.

FSDP2 and ZeRO shard by rows and elements, so any number of ranks will do; samplers shard by heads, and so does
attention over a shared row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rlctl.models.model_tensors import tensors_of_config
from specs.errors import Problem
from specs.model_facts import ModelFacts, model_facts, shares_out, sharing_degrees
from specs.schema.rank_groups import devices_of_a_process
from specs.schema.recipes import SamplingSpec
from specs.schema.role_section import Lora
from specs.schema.roles import RoleName
from specs.text import listed


def shard_problems(spec: SamplingSpec, config: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield what of the model does not divide by `rollout.engine.tensor_parallel`. `config`: a parsed config.json."""
    facts, parts = model_facts(config), devices_of_a_process(spec.rollout)
    if facts is None or parts == 1:
        return
    inner = facts.expert_size if facts.experts else facts.intermediate_size
    fitting = [n for n in sharing_degrees(facts.heads, facts.kv_heads) if inner % n == 0]
    if parts not in fitting:
        by_heads = not shares_out(facts.heads, facts.kv_heads, parts)
        what = _heads(facts) if by_heads else f"the {inner} columns of the model's MLP"
        yield Problem("rollout.engine.tensor_parallel", f"{what} are not divisible by it", f"use {listed(fitting)}")


def sequence_problems(key: str, degree: int, config: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield layers that the `degree` ranks of a row cannot share: those with a state, and attention heads that do not
    divide. `key`: of the degree, dotted."""
    facts = model_facts(config)
    if facts is not None and facts.state_layers:
        yield Problem(key, "layers that carry a state from token to token need whole rows on every rank", "set it to 1")
    if facts is not None and not shares_out(facts.heads, facts.kv_heads, degree):
        hint = f"use {listed(sharing_degrees(facts.heads, facts.kv_heads))}"
        yield Problem(key, f"{_heads(facts)} are not divisible by it", hint)


def _heads(facts: ModelFacts) -> str:
    return f"the model's {facts.heads} attention heads and {facts.kv_heads} key-value heads"


def adapter_problems(role: RoleName, lora: Lora, config: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield names in `lora.targets` that are no linear layer of the role's model below its head; where the model's
    layers are known."""
    known, facts = tensors_of_config(config), model_facts(config)
    if known is None or facts is None:
        return
    key, layers = f"{role}.lora.targets", [parameter.name.removesuffix(".weight") for parameter in known.adaptable]
    names = ", ".join(dict.fromkeys(layer.rpartition(".")[2] for layer in layers))
    for name in lora.targets:
        if name != "all-linear" and not any(f".{layer}".endswith(f".{name}") for layer in layers):
            is_head = name == "lm_head"
            message = "the head gets no adapter, tied or not" if is_head else f"the model has no linear layer {name!r}"
            yield Problem(key, message, f"it has {names}" + ("; experts get no adapters" if facts.experts else ""))
