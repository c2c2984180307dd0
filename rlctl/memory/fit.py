"""Compare what the roles of a run hold together with the memory of the GPUs and hosts that they share."""

from __future__ import annotations

import shutil
from pathlib import Path

from rlctl.memory.memory_plan import MemoryPlan, plan_memory
from rlctl.memory.places import Place
from rlctl.models.hardware import gpu_memory_GiB, host_memory_GiB
from specs.errors import Problem, SpecError
from specs.memory_parts import GIB
from specs.packages import page
from specs.rules.all_rules import with_values
from specs.schema.engines.held_model import REST_OF_SHARE
from specs.schema.roles import ROLES
from specs.schema.spec import Spec

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
    errors, warnings = (plan_problems(spec, plan) for plan in (certain, likely))
    return (errors, []) if errors else ([], warnings)


def plan_problems(spec: Spec, plan: MemoryPlan) -> list[Problem]:
    """Return the places that do not fit, and the samplers whose share of a GPU is no larger than their weights."""
    problems = [does_not_fit(spec, place) for place in plan.places if place.fits is False]
    for role in plan.roles:
        if any(part.name == REST_OF_SHARE and not part.nbytes for part in role.parts):
            message = "its share of a GPU is no larger than its weights: without a KV cache it cannot start"
            hint = "give it a larger share, or share its weights out to more GPUs (tensor_parallel)"
            problems.append(Problem(f"{role.role}.engine", message, hint))
    return problems


def does_not_fit(spec: Spec, place: Place) -> Problem:
    """Describe what a place needs, what is largest there, and what makes that smaller."""
    assert place.largest is not None, "what does not fit has parts"
    role, part = place.largest
    message = (
        f"does not fit: {place.name} needs {size(place.peak)} of {size(place.memory)} in the phase {place.fullest}; "
        f"the largest part is {part.name} of {role}, {size(part.nbytes)}"
    )
    key, hint = f"{role}.engine.kind", "use more GPUs, a smaller model, or an engine that shards or offloads more"
    if part.context:
        key, hint = f"{role}.processes", "start fewer processes, or take a host with more memory"
    elif ROLES[role].samples:
        hint = "lower what its engine takes for sequences and their cache, or data.max_response_tokens"
    elif part.avoided_by:
        hint = f"{role}.engine.{part.avoided_by} does without that part, with more traffic; else {hint}"
    elif part.of_tokens:
        key, hint = f"{role}.micro_batch_tokens", "lower it, or recompute activations (gradient_checkpointing)"
    (problem,) = with_values(spec, [Problem(key, message, f"{hint}; {page('check-config.md')} says what each costs")])
    return problem


def size(nbytes: float) -> str:
    """Return bytes as GiB, or TiB where they are many."""
    return f"{nbytes / GIB / 1024:,.3g} TiB" if nbytes >= 1024 * GIB else f"{nbytes / GIB:.1f} GiB"
