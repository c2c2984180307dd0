"""What to change in a spec so that it fits, or so that it uses what is there: found by planning again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlctl.memory_models import find_model
from rlctl.memory_parts import Phase
from rlctl.memory_plan import MemoryPlan, plan_memory
from rlctl.memory_rollout import Replica
from specs.engine_tables import TorchRolloutEngine, VllmEngine
from specs.schema import Spec

USED_SHARE = 0.95  # of a device: allocators leave gaps
_STEP_TOKENS = 256
_GRID = [share / 100 for share in range(95, 0, -5)]


@dataclass(frozen=True)
class Suggestion:
    """`value` None: nothing that this key may be makes it fit."""

    key: str
    now: float
    value: float | None
    why: str


@dataclass(frozen=True)
class Planner:
    """Plans variants of a spec on the same machine."""

    spec: Spec
    spec_dir: Path
    gpu_GiB: float
    host_GiB: float

    def plan(self, role: str = "", **changes: Any) -> MemoryPlan:
        spec = self.spec
        if role:
            section: Any = getattr(spec, role)
            own = {name: value for name, value in changes.items() if name in type(section).model_fields}
            table = {name: value for name, value in changes.items() if name not in own}
            if table:
                own["engine"] = section.engine.model_copy(update=table)
            spec = spec.model_copy(update={role: section.model_copy(update=own)})
        return plan_memory(spec, self.spec_dir, gpu_GiB=self.gpu_GiB, host_GiB=self.host_GiB, may_build=True)

    def fits(self, role: str, **changes: Any) -> bool:
        """Whether the role's devices hold everyone in the phase in which these keys matter."""
        phase: Phase = "learn" if role == "actor" else "generate"
        kind = "GPU" if getattr(self.spec, role).devices else "host"
        return self.plan(role, **changes).fits((phase,), kind=kind, share=USED_SHARE)


def suggestions(planner: Planner, plan: MemoryPlan) -> list[Suggestion]:
    """Empty where no memory is known to fit into, or the roles are fake."""
    known = {role.role for role in plan.roles}
    if not known or not any(place.memory for place in plan.places):
        return []
    found = [*_micro_batch(planner)] if "actor" in known else []
    return found + ([*_rollout(planner)] if "rollout" in known else [])


def _micro_batch(planner: Planner) -> Iterator[Suggestion]:
    spec = planner.spec
    least, now = spec.max_sequence_tokens, spec.actor.micro_batch_tokens
    share = spec.samples_per_step // spec.algorithm.mini_batches_per_step // spec.actor.processes
    most = max(least, share * least)  # all that a rank gets of a mini-batch: more is never there
    best = largest(lambda tokens: planner.fits("actor", micro_batch_tokens=tokens), least, most, _STEP_TOKENS)
    key = "actor.micro_batch_tokens"
    if best is None:
        yield Suggestion(key, now, None, f"not even one sequence of {least:,} tokens fits; {_instead(spec)}")
    elif best >= most:
        # More is of no use, and harmless.
        yield Suggestion(key, now, max(now, best), "a rank's whole share of a mini-batch fits at once")
    else:
        yield Suggestion(key, now, best, f"the largest that leaves {1 - USED_SHARE:.0%} of the device free")


def _instead(spec: Spec) -> str:
    """What saves the most, when fewer tokens do not help."""
    engine: Any = spec.actor.engine
    if not spec.actor.gradient_checkpointing:
        return "set actor.gradient_checkpointing = true"
    if engine.kind == "ddp" and spec.actor.processes > 1:
        return 'cut the model: actor.engine.kind = "fsdp2"'
    if engine.kind == "fsdp2" and not engine.sync_every_micro_batch:
        return "set actor.engine.sync_every_micro_batch = true: no whole gradient is kept"
    if engine.kind == "fsdp2" and engine.offload == "none":
        return 'use more GPUs, or actor.engine.offload = "cpu"'
    if engine.kind in ("zero", "zero3") and not engine.offload_optimizer:
        return "use more GPUs, or actor.engine.offload_optimizer = true"
    return "use more GPUs, a smaller model, or actor.lora"


def _rollout(planner: Planner) -> Iterator[Suggestion]:
    spec, engine = planner.spec, planner.spec.rollout.engine
    if isinstance(engine, TorchRolloutEngine):
        yield _slots(planner, engine)
        return
    name = "gpu_memory_utilization" if isinstance(engine, VllmEngine) else "memory_fraction"
    if not spec.rollout.devices or getattr(engine, "kv_cache_GiB", None) is not None:
        return
    now = float(getattr(engine, name))
    best = next((share for share in _GRID if planner.fits("rollout", **{name: share})), None)
    key = f"rollout.engine.{name}"
    if best is None:
        yield Suggestion(key, now, None, "what the other roles keep leaves no room")
        return
    replica = _replica(planner)
    if replica.weights >= best * planner.gpu_GiB * 2**30:
        yield Suggestion(key, now, None, "the weights alone do not fit: raise rollout.engine.tensor_parallel")
        return
    tokens = (int(best * planner.gpu_GiB * 2**30) - replica.weights) // replica.cache_bytes_per_token
    at_once = tokens // spec.max_sequence_tokens
    yield Suggestion(
        key, now, best, f"room for keys and values of {tokens:,} tokens: {at_once:,} sequences of full length at once"
    )


def _replica(planner: Planner) -> Replica:
    model = find_model(planner.spec, "rollout", planner.spec_dir, may_build=True)
    spec = planner.spec
    return Replica(
        engine=spec.rollout.engine,
        tensors=model.tensors,
        facts=model.facts,
        dtype=spec.rollout_dtype,
        sequences=spec.samples_per_step,
        max_sequence_tokens=spec.max_sequence_tokens,
        max_prompt_tokens=spec.data.max_prompt_tokens,
        gpu_GiB=planner.gpu_GiB,
        colocated=False,
    )


def _slots(planner: Planner, engine: TorchRolloutEngine) -> Suggestion:
    spec = planner.spec
    most = max(1, -(-spec.samples_per_step // spec.rollout.processes))
    best = largest(lambda slots: planner.fits("rollout", max_sequences=slots), 1, most, 1)
    key, now = "rollout.engine.max_sequences", engine.max_sequences
    if best is None:
        return Suggestion(key, now, None, "what the other roles keep leaves no room")
    if best >= most:
        return Suggestion(key, now, max(now, best), "all answers of a step at once")
    return Suggestion(key, now, best, "the largest cache that fits")


def largest(fits: Callable[[int], bool], least: int, most: int, step: int) -> int | None:
    """The largest of least, least + step, … most that fits, where whatever is smaller than one that fits does too."""
    if not fits(least):
        return None
    low, high = 0, -(-(most - least) // step)
    while low < high:
        middle = (low + high + 1) // 2
        if fits(min(most, least + middle * step)):
            low = middle
        else:
            high = middle - 1
    return min(most, least + low * step)
