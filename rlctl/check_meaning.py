"""What a spec means, as plain values: roles, the seats of their ranks, the reference, the arithmetic of a step."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlctl.attention_table import attention_entry
from rlctl.plan import Plan
from specs.interpreters import SHOWN, look_at
from specs.model_files import resolve_model
from specs.reference import reference_of
from specs.schema import RefSection, RoleSection, Spec
from specs.seats import mesh_of, seat_groups


def roles(spec: Spec, plan: Plan, spec_dir: Path) -> dict[str, dict[str, Any]]:
    """Role → where it runs and what it holds. The reward role holds the tokenizer, so it has a model but no engine."""
    return {role.role: _role(spec, plan, role.role, spec_dir) for role in plan.roles}


def _role(spec: Spec, plan: Plan, name: Any, spec_dir: Path) -> dict[str, Any]:
    placed = plan.role(name)
    holds_model = name != "reward"
    section: Any = spec.role(name)
    return {
        "model": str(resolve_model(spec.model_path(name), spec_dir)),
        "engine": section.engine.kind if holds_model else None,
        "dtype": (section.dtype or spec.actor.dtype) if holds_model else None,
        **attention_entry(spec, name, spec_dir),
        "launcher": placed.launcher,
        "processes": placed.processes,
        "nodes": placed.nodes,
        "devices": list(placed.devices),
        "threads": placed.threads,
        "python": placed.python,
        "versions": _versions(section, placed.python),
    }


def _versions(section: RoleSection, python: str) -> dict[str, str]:
    """What the role's own interpreter has installed, Python first; empty where the role runs in ours, or it did not
    answer."""
    if not section.python or (found := look_at(python)).failure:
        return {}
    return {"python": found.python, **{name: found.versions[name] for name in SHOWN if name in found.versions}}


def reference(spec: Spec) -> dict[str, Any]:
    """Whether the run needs a reference model, whether one is loaded, which, and why."""
    found = reference_of(spec)
    placed = spec.role("ref") if found.loaded else None
    return {
        "needed": found.needed,
        "loaded": found.loaded,
        "model": found.model,
        "why": found.why,
        "engine": placed.engine.kind if isinstance(placed, RefSection) else "",
        "devices": list(placed.devices) if placed else [],
    }


def seats(spec: Spec) -> dict[str, dict[str, Any]]:
    """Role → its mesh and the seat of every rank, for roles whose model is cut across ranks."""
    found: dict[str, dict[str, Any]] = {}
    for name in spec.roles:
        section = spec.role(name)
        mesh = mesh_of(section)
        if mesh is not None:
            listed = [asdict(seat) for group in seat_groups(section) for seat in group.seats]
            found[name] = {"replicate": mesh.replicate, "shard": mesh.shard, "seats": listed}
    return found


def batch(spec: Spec) -> dict[str, int]:
    """The arithmetic of a step and of the run."""
    algorithm, data = spec.algorithm, spec.data
    return {
        "prompts_per_step": data.prompts_per_step,
        "group_size": algorithm.group_size,
        "samples_per_step": spec.samples_per_step,
        "mini_batches_per_step": algorithm.mini_batches_per_step,
        "samples_per_mini_batch": spec.samples_per_step // algorithm.mini_batches_per_step,
        "epochs_per_step": algorithm.epochs_per_step,
        "steps": spec.run.steps,
        "optimizer_steps": spec.optimizer_steps,
        "max_sequence_tokens": spec.max_sequence_tokens,
        "max_tokens_per_step": spec.samples_per_step * spec.max_sequence_tokens,
        "micro_batch_tokens": spec.actor.micro_batch_tokens,
    }
