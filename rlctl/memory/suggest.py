"""What to change in a spec so that it fits, or so that it uses what is there: found by planning again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlctl.memory.memory_plan import MemoryPlan, plan_memory
from rlctl.memory.role_models import find_model
from rlctl.models.shapes_fit import sequence_problems
from specs.memory_parts import Moment
from specs.schema.engines.held_model import Replica, longest_share, replica_of
from specs.schema.roles import ACTOR, ROLES, ROLLOUT
from specs.schema.spec import Spec

USED_SHARE = 0.95  # of a device: allocators leave gaps
DEGREES = (1, 2, 4, 8)
_STEP_TOKENS = 256
_LONGEST = 2**23
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
        phase: Moment = "train" if ROLES[role].learns else "rollout"
        kind = "GPU" if getattr(self.spec, role).devices else "host"
        return self.plan(role, **changes).fits((phase,), kind=kind, share=USED_SHARE)


def suggestions(planner: Planner, plan: MemoryPlan) -> list[Suggestion]:
    """Empty where no memory is known to fit into, an engine does not say what it holds, or the roles are fake."""
    known = {role.role for role in plan.roles}
    if not known or plan.not_known or not any(place.memory for place in plan.places):
        return []
    found = [*_micro_batch(planner)] if ACTOR in known else []
    return found + ([*_rollout(planner)] if ROLLOUT in known else [])


def _micro_batch(planner: Planner) -> Iterator[Suggestion]:
    spec, degree = planner.spec, planner.spec.actor.sequence_parallel
    least, now = -(-spec.max_sequence_tokens // degree), spec.actor.micro_batch_tokens
    most = max(least, longest_share(spec, ACTOR))  # all that a rank gets of a mini-batch: more is never there
    best = largest(lambda tokens: planner.fits(ACTOR, micro_batch_tokens=tokens), least, most, _STEP_TOKENS)
    key = "actor.micro_batch_tokens"
    if best is None:
        longest = spec.max_sequence_tokens
        yield Suggestion(key, now, None, f"not even one sequence of {longest:,} tokens fits; {_instead(spec)}")
        yield from _more_ranks_share(planner)
    elif best >= most:
        # More is of no use, and harmless.
        yield Suggestion(key, now, max(now, best), "a rank's whole share of a mini-batch fits at once")
    else:
        yield Suggestion(key, now, best, f"the largest that leaves {1 - USED_SHARE:.0%} of the device free")


def _more_ranks_share(planner: Planner) -> Iterator[Suggestion]:
    """The smallest degree at which a sequence of full length fits."""
    longest, now = planner.spec.max_sequence_tokens, planner.spec.actor.sequence_parallel
    for degree in degrees_of(planner):
        part = -(-longest // degree)
        if degree > now and planner.fits(ACTOR, sequence_parallel=degree, micro_batch_tokens=part):
            why = f"each of {degree} ranks then computes {part:,} tokens of it: actor.micro_batch_tokens = {part}"
            yield Suggestion("actor.sequence_parallel", now, degree, why)
            return


def degrees_of(planner: Planner) -> list[int]:
    """How many of the actor's ranks may share a sequence: as processes, engine and attention heads allow."""
    actor = planner.spec.actor
    if not actor.engine.cuts_sequences:
        return [1]
    config = find_model(planner.spec, ACTOR, planner.spec_dir, may_build=True).config
    fitting = [degree for degree in DEGREES if actor.processes % degree == 0]
    return [degree for degree in fitting if not [*sequence_problems("", degree, config)]]


def longest_sequences(planner: Planner) -> dict[int, int]:
    """Degree of sequence parallelism → tokens of the longest sequence that the actor's devices then hold, one at a
    time, with the rest of the spec as it is. 0: not even a short one fits. Empty where nothing is known to fit into."""
    plan = planner.plan()
    if ACTOR not in {role.role for role in plan.roles} or plan.not_known or not any(p.memory for p in plan.places):
        return {}
    found = {}
    for degree in degrees_of(planner):

        def fits(tokens: int, degree: int = degree) -> bool:
            longer = replace(planner, spec=_with_longest(planner.spec, tokens * degree))
            return longer.fits(ACTOR, sequence_parallel=degree, micro_batch_tokens=tokens)

        part = largest(fits, _STEP_TOKENS, _LONGEST // degree, _STEP_TOKENS)
        found[degree] = (part or 0) * degree
    return found


def _with_longest(spec: Spec, tokens: int) -> Spec:
    response = max(1, tokens - spec.data.max_prompt_tokens)
    return spec.model_copy(update={"data": spec.data.model_copy(update={"max_response_tokens": response})})


def _instead(spec: Spec) -> str:
    """What saves the most, when fewer tokens do not help."""
    if spec.actor.gradient_checkpointing is not True:
        return "set actor.gradient_checkpointing = true"
    return spec.actor.engine.memory_hint(spec.actor.processes) or "use more GPUs, a smaller model, or actor.lora"


def _rollout(planner: Planner) -> Iterator[Suggestion]:
    spec, engine = planner.spec, planner.spec.rollout.engine
    memory_key = engine.memory_key(on_gpu=bool(spec.rollout.devices))
    if memory_key is None or memory_key.unit == "GiB":
        return
    name = memory_key.name
    if memory_key.unit == "slots":
        yield _slots(planner, name)
        return
    now = float(getattr(engine, name))
    best = next((share for share in _GRID if planner.fits(ROLLOUT, **{name: share})), None)
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
    model = find_model(planner.spec, ROLLOUT, planner.spec_dir, may_build=True)
    spec = planner.spec
    replica = replica_of(spec, model.tensors, model.facts, colocated=False, gpu_GiB=planner.gpu_GiB)
    return replace(replica, sequences=spec.samples_per_step)


def _slots(planner: Planner, name: str) -> Suggestion:
    spec = planner.spec
    most = max(1, -(-spec.samples_per_step // spec.rollout.processes))
    best = largest(lambda slots: planner.fits(ROLLOUT, **{name: slots}), 1, most, 1)
    key, now = f"rollout.engine.{name}", getattr(spec.rollout.engine, name)
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
