"""Rules of rollout engines that come from other projects: what they decide themselves, and the GPUs of a replica."""

from __future__ import annotations

from collections.abc import Iterator

from specs.engine_tables import OWN_ATTENTION, VllmEngine
from specs.errors import Problem
from specs.explain import show
from specs.schema import Spec
from specs.seats import devices_of_a_process


def rollout_problems(spec: Spec) -> Iterator[Problem]:
    """Everything that is wrong with the rollout's engine and what surrounds it."""
    rollout, kind = spec.rollout, spec.rollout.engine.kind
    if kind in OWN_ATTENTION and rollout.attn_implementation is not None:
        message = f"has no effect: {kind} chooses its attention itself, by device, dtype and head size"
        hint = "remove the key; as_built.json says what it took"
        yield Problem("rollout.attn_implementation", message, hint, show(rollout.attn_implementation))
    engine = rollout.engine
    if isinstance(engine, VllmEngine) and "gpu_memory_utilization" in engine.model_fields_set:
        why = "" if rollout.devices else "rollout runs on the CPU"
        why = why or ("rollout.engine.kv_cache_GiB says how large the KV cache is" if engine.kv_cache_GiB else "")
        if why:
            share = show(engine.gpu_memory_utilization)
            yield Problem("rollout.engine.gpu_memory_utilization", f"has no effect: {why}", "remove the key", share)
    each = devices_of_a_process(rollout)
    if each > 1 and not rollout.devices and not isinstance(engine, VllmEngine):
        message = "cuts the model across GPUs, and rollout runs on the CPU"
        hint = f"remove the key, or name {each * rollout.processes} GPUs in rollout.devices"
        yield Problem("rollout.engine.tensor_parallel", message, hint, str(each))
    elif each > 1 and rollout.nodes > 1:
        message = "replicas that are cut across GPUs on several nodes have not been tried"
        yield Problem("rollout.engine.tensor_parallel", message, "set rollout.nodes = 1", str(each))
