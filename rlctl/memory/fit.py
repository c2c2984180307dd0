"""Whether a run fits: what its roles hold together, against the memory of the GPUs and hosts that they share."""

from __future__ import annotations

import shutil
from pathlib import Path

from rlctl.memory.memory_plan import plan_memory
from rlctl.memory.places import Place
from rlctl.models.hardware import gpu_memory_GiB, host_memory_GiB
from specs.errors import Problem, SpecError
from specs.memory_parts import GIB
from specs.schema.engines.engine_table import RolloutTable, TrainTable, engine_of
from specs.schema.roles import RoleName
from specs.schema.spec import Spec
from specs.text import show

LARGEST_GPU_GIB = 288.0  # of any GPU there is
LARGEST_HOST_GIB = 24 * 1024.0  # of any host that can be rented


def fit_problems(spec: Spec, spec_dir: Path, *, here: bool) -> tuple[list[Problem], list[Problem]]:
    """Return errors and warnings about places that do not fit: what shapes and dtypes alone make too large is an error,
    what is so with estimates a warning. `here`: the run is for this machine; else the largest there is counts. Nothing
    is said of models whose shapes are not known."""
    gpus_here = here and shutil.which("nvidia-smi")
    gpu_GiB = gpu_memory_GiB()[0] if gpus_here else LARGEST_GPU_GIB
    on_gpus = any(spec.role(role).devices for role in spec.roles)
    host_GiB = (host_memory_GiB() if here and (gpus_here or not on_gpus) else 0.0) or LARGEST_HOST_GIB
    try:
        certain, likely = (
            plan_memory(spec, spec_dir, gpu_GiB=gpu_GiB, host_GiB=host_GiB, exact=exact) for exact in (True, False)
        )
    except SpecError:  # which others report
        return [], []
    errors, warnings = (
        [does_not_fit(spec, place) for place in plan.places if place.fits is False] for plan in (certain, likely)
    )
    return (errors, []) if errors else ([], warnings)


def does_not_fit(spec: Spec, place: Place) -> Problem:
    """Describe what a place needs, what is largest there, and the one thing to do about it."""
    assert place.largest is not None, "what does not fit has parts"
    role, part = place.largest
    message = (
        f"does not fit: {place.name} needs {size(place.peak)} of {size(place.memory)} in the phase {place.fullest}; "
        f"the largest part is {part.name} of {role}, {size(part.nbytes)}"
    )
    key, value, hint = _next_action(spec, role, of_tokens=part.of_tokens, weights=part.name == "weights")
    return Problem(key, message, hint, value)


def _next_action(spec: Spec, role: RoleName, *, of_tokens: bool, weights: bool) -> tuple[str, str, str]:
    """Return the key that makes the largest part smaller, its value and what to do."""
    section = spec.role(role)
    engine = engine_of(section)
    if isinstance(engine, RolloutTable):
        name = engine.memory_key(on_gpu=bool(section.devices))
        if name is not None and not weights:
            return f"{role}.engine.{name}", show(getattr(engine, name)), "lower it, or data.max_response_tokens"
    elif of_tokens and (recomputed := getattr(section, "gradient_checkpointing", True)) is not True:
        return f"{role}.gradient_checkpointing", show(recomputed), "set it to true"
    elif of_tokens:
        longest = -(-spec.longest_tokens(role) // getattr(section, "sequence_parallel", 1))
        tokens = getattr(section, "micro_batch_tokens", 0)
        hint = "lower it" if tokens > longest else f"let more ranks share a sequence: raise {role}.sequence_parallel"
        return f"{role}.micro_batch_tokens", show(tokens), hint
    own = engine.memory_hint(role) if isinstance(engine, TrainTable) else None
    return f"{role}.engine.kind", show(engine.kind if engine else ""), own or "use more GPUs, or a smaller model"


def size(nbytes: float) -> str:
    """Return bytes as GiB, or TiB where they are many."""
    return f"{nbytes / GIB / 1024:,.3g} TiB" if nbytes >= 1024 * GIB else f"{nbytes / GIB:.1f} GiB"
