"""Roles that cannot fit: what they hold by shapes alone is more than the memory of the machine, or of any.

Activations and what an engine gathers are left out: `rlctl plan` has them.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from typing import Any

from rlctl.models.model_tensors import tensors_of_config
from rlctl.preflight.host_memory import gpu_memory_GiB, host_memory_GiB
from specs.errors import Problem
from specs.memory_parts import GIB, Part, peak
from specs.model_facts import ModelFacts, model_facts
from specs.model_shapes import ModelTensors
from specs.schema.engines.engine_table import RolloutTable, TrainTable, engine_of
from specs.schema.engines.held_model import held_trainer, replica_of
from specs.schema.role_section import RoleSection
from specs.schema.roles import ROLES, RoleName
from specs.schema.spec import Spec
from specs.text import show

LARGEST_GPU_GIB = 288.0  # of any GPU there is
LARGEST_HOST_GIB = 24 * 1024.0  # of any host that can be rented


def size_problems(spec: Spec, config: Mapping[str, Any], *, here: bool) -> Iterator[Problem]:
    """`config`: the main model's parsed config.json, {} where it is not at hand. `here`: the run is for this machine;
    else only what fits no machine at all is a problem."""
    facts, tensors = model_facts(config), tensors_of_config(config)
    if facts is None or tensors is None:
        return
    for role, section in spec.sections():
        engine = engine_of(section)
        if role not in spec.roles or spec.model_path(role) != spec.model.path or engine is None:
            continue
        if [*engine.problems(spec, role, section)]:
            continue  # its keys may be what its formula cannot count with
        has_GiB = _memory_GiB(on_gpu=bool(section.devices), here=here)
        own = tensors if ROLES[role].head == "lm" else tensors.with_score_layer(facts.hidden_size)
        parts = [part for part in _parts(spec, role, section, own, facts, has_GiB) if part.exact and not part.host]
        ranks = 1 if section.devices else max(1, section.processes // section.nodes)
        if (needs := ranks * peak(parts)) > has_GiB * GIB:
            yield _too_large(spec, role, section, parts, needs, has_GiB)


def _memory_GiB(*, on_gpu: bool, here: bool) -> float:
    if not on_gpu:
        return (host_memory_GiB() if here else 0.0) or LARGEST_HOST_GIB
    return gpu_memory_GiB()[0] if here and shutil.which("nvidia-smi") else LARGEST_GPU_GIB


def _parts(
    spec: Spec, role: RoleName, section: RoleSection, tensors: ModelTensors, facts: ModelFacts, gpu_GiB: float
) -> Iterator[Part]:
    engine = engine_of(section)
    if isinstance(engine, TrainTable):
        yield from engine.memory(held_trainer(spec, role, tensors)) or ()
    elif isinstance(engine, RolloutTable):
        yield from engine.memory(replica_of(spec, tensors, facts, colocated=False, gpu_GiB=gpu_GiB)) or ()


def _too_large(
    spec: Spec, role: RoleName, section: RoleSection, parts: list[Part], needs: int, has_GiB: float
) -> Problem:
    engine, largest = engine_of(section), max(parts, key=lambda part: part.nbytes)
    where = "a GPU" if section.devices else "a host"
    each = f" in each of {section.processes} processes" if section.processes > 1 else ""
    most = f"{largest.name}: {_size(largest.nbytes)}{each}"
    message = f"{role} holds {_size(needs)} ({most}), and {where} has {_size(has_GiB * GIB)}"
    key = engine.memory_key(on_gpu=bool(section.devices)) if isinstance(engine, RolloutTable) else None
    if key is None or largest.name == "weights":
        hint = "use a smaller model, more processes on more hosts, or an engine that cuts the model; see `rlctl plan`"
        return Problem(f"{role}.engine.kind", message, hint, show(engine.kind if engine else ""))
    hint = f"lower it, or data.max_response_tokens ({spec.data.max_response_tokens}); `rlctl plan` says what fits"
    return Problem(f"{role}.engine.{key.name}", message, hint, show(getattr(engine, key.name)))


def _size(nbytes: float) -> str:
    return f"{nbytes / GIB / 1024:,.3g} TiB" if nbytes >= 1024 * GIB else f"{nbytes / GIB:,.3g} GiB"
