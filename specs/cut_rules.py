"""Whether a model can be cut as the spec asks: heads, widths and experts that must share out to the GPUs of a replica.

FSDP2 and ZeRO cut by rows and elements, so any number of ranks will do; samplers cut by heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from specs.errors import Problem
from specs.explain import listed
from specs.model_facts import model_facts
from specs.schema import Spec
from specs.seats import devices_of_a_process


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
        what = f"the width of the model's MLP, {inner},"
    hint = f"use {listed(fitting)}"
    yield Problem("rollout.engine.tensor_parallel", f"{what} cannot be shared out evenly", hint, str(parts))


def _shares_out(heads: int, kv_heads: int, parts: int) -> bool:
    """Key-value heads are cut, or, where there are more GPUs than heads, repeated."""
    return heads % parts == 0 and (kv_heads % parts == 0 or parts % kv_heads == 0)
