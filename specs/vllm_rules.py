"""Rules of adapters that vLLM applies itself: `rollout.engine.lora = "adapters"`."""

from __future__ import annotations

from collections.abc import Iterator

from specs.engine_tables import VllmEngine
from specs.errors import Problem
from specs.explain import show
from specs.schema import Spec

# vLLM 0.32, vllm/config/lora.py: ranks that it makes room for. A rank in between takes the room of the next one.
LORA_ROOMS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


def lora_room(rank: int) -> int:
    """The smallest rank that vLLM makes room for and that holds adapters of `rank`, itself at most the largest."""
    return next(room for room in LORA_ROOMS if room >= rank)


def vllm_problems(spec: Spec) -> Iterator[Problem]:
    """Everything that is wrong with adapters in vLLM."""
    engine, lora = spec.rollout.engine, spec.actor.lora
    if not isinstance(engine, VllmEngine):
        return
    key = "rollout.engine.lora"
    if lora is None:
        if "lora" in engine.model_fields_set:
            message = "has no effect: the actor trains no adapters (actor.lora)"
            yield Problem(key, message, "remove the key, or add actor.lora", show(engine.lora))
        return
    if engine.lora == "merged":
        return
    if lora.rank > LORA_ROOMS[-1]:
        message = f'rollout.engine.lora = "adapters" takes ranks up to {LORA_ROOMS[-1]}: vLLM has no room for more'
        hint = f'use at most {LORA_ROOMS[-1]}, or rollout.engine.lora = "merged"'
        yield Problem("actor.lora.rank", message, hint, str(lora.rank))
    if spec.rollout.devices and spec.rollout_dtype == "fp32":
        message = "vLLM's kernels for adapters compute in bf16 on a GPU, and rollout is fp32"
        hint = 'set rollout.dtype = "bf16", or rollout.engine.lora = "merged"'
        yield Problem(key, message, hint, show(engine.lora))
