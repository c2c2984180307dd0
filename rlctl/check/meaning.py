"""Say what a spec means, in plain values: roles, the placement of their ranks, the reference, the arithmetic of a
step."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlctl.models.paths import resolve_model
from rlctl.models.vocabulary import reference_of
from rlctl.preflight.interpreters import SHOWN, look_at
from rlctl.preflight.role_choices import role_attention, role_kernels
from rlctl.processes.placement import Plan
from specs.schema.engines.engine_table import engine_of, not_known
from specs.schema.rank_groups import mesh_is_known, mesh_of, shard_groups
from specs.schema.role_section import RoleSection
from specs.schema.roles import ACTOR, REF, ROLES, ROLLOUT, RoleName
from specs.schema.spec import RefSection, Spec


def roles(spec: Spec, plan: Plan, spec_dir: Path, *, elsewhere: bool = False) -> dict[str, dict[str, Any]]:
    """Return by role where it runs and what it holds. A role that holds only the tokenizer has a model but
    no engine."""
    return {role.role: _role(spec, plan, role.role, spec_dir, elsewhere) for role in plan.roles}


def _role(spec: Spec, plan: Plan, name: Any, spec_dir: Path, elsewhere: bool) -> dict[str, Any]:
    placed = plan.role(name)
    holds_model = ROLES[name].holds_model
    section: Any = spec.role(name)
    return {
        "model": str(resolve_model(spec.model_path(name), spec_dir)),
        "engine": section.engine.kind if holds_model else None,
        "dtype": spec.dtype(name) if holds_model else None,
        **_attention(spec, name, spec_dir, elsewhere),
        **_kernels(spec, name, spec_dir, elsewhere),
        "launcher": placed.launcher,
        "processes": placed.processes,
        "nodes": placed.nodes,
        "devices": list(placed.devices),
        "threads": placed.threads,
        "python": placed.python,
        "versions": _versions(section, placed.python),
        "not_known": _not_known(section),
    }


def _not_known(section: RoleSection) -> list[str]:
    """Return what the table of the role's engine leaves open, in words; empty for engines of rlctl's own."""
    engine = engine_of(section)
    return [] if engine is None else not_known(engine)


def _versions(section: RoleSection, python: str) -> dict[str, str]:
    """Return what the role's own interpreter has installed, Python first; empty where the role runs in ours, or it did
    not answer."""
    if not section.python or (found := look_at(python)).failure:
        return {}
    return {"python": found.python, **{name: found.versions[name] for name in SHOWN if name in found.versions}}


def reference(spec: Spec) -> dict[str, Any]:
    """Say whether the run needs a reference model, whether one is loaded, which, and why."""
    model, why = reference_of(spec)
    placed = spec.role(REF) if model else None
    return {
        "needed": spec.needs_ref,
        "loaded": bool(model),
        "model": model,
        "why": why,
        "engine": placed.engine.kind if isinstance(placed, RefSection) else "",
        "devices": list(placed.devices) if placed else [],
    }


def hosts(spec: Spec, plan: Plan) -> list[dict[str, Any]]:
    """Return each host of the run and who sits there: role → ranks and the numbers of their GPUs."""
    found: dict[int, dict[str, Any]] = {}
    for role in plan.roles:
        remote = {node.node_rank: node.host for node in role.remote}
        for node, number in enumerate(spec.role(role.role).hosts):
            name = remote.get(node, "this host" if number == 0 else f"node {number}")
            held = {"ranks": list(role.ranks_of(node)), "devices": list(role.devices)}
            found.setdefault(number, {"number": number, "host": name, "roles": {}})["roles"][role.role] = held
    return [found[number] for number in sorted(found)]


def links(spec: Spec, plan: Plan) -> list[dict[str, Any]]:
    """Return the ways that weights take, from the actor's rank 0 on this host: to which host, and how many replicas
    there."""
    replicas = [
        (place["host"], len(place["roles"].get(ROLLOUT, {"ranks": []})["ranks"])) for place in hosts(spec, plan)
    ]
    return [{"host": host, "replicas": count} for host, count in replicas if count]


def placement(spec: Spec) -> dict[str, dict[str, Any]]:
    """Return by role its mesh and the place of every rank, for roles whose model or samples are cut across ranks; null
    where the engine does not say."""
    found: dict[str, dict[str, Any]] = {}
    for name in spec.roles:
        section = spec.role(name)
        mesh = mesh_of(section)
        if mesh is not None:
            listed = [asdict(rank) for group in shard_groups(section) for rank in group.ranks]
            axes = {"replicate": mesh.replicate, "shard": mesh.shard, "sequence": mesh.sequence}
            found[name] = {**axes, "ranks": listed}
        elif not mesh_is_known(section):
            found[name] = {"replicate": None, "shard": None, "sequence": None, "ranks": []}
    return found


def batch(spec: Spec) -> dict[str, int]:
    """Return the arithmetic of a step and of the run."""
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
        **{f"{role}_optimizer_steps": spec.optimizer_steps_of(role) for role in spec.losses if role != ACTOR},
        "max_sequence_tokens": spec.max_sequence_tokens,
        "max_tokens_per_step": spec.samples_per_step * spec.max_sequence_tokens,
        "micro_batch_tokens": spec.actor.micro_batch_tokens,
        "sequence_parallel": spec.actor.sequence_parallel,
    }


def _attention(spec: Spec, role: RoleName, spec_dir: Path, elsewhere: bool) -> dict[str, str | None]:
    """Return the attention: `attn_implementation` is what will be in effect, null where only the engine knows or there
    is none; `attn_function` is what will be called then."""
    found = role_attention(spec, role, spec_dir, elsewhere=elsewhere)
    if found is None:
        return dict.fromkeys(("attn_implementation", "attn_asked", "attn_function", "attn_why"))
    return {
        "attn_implementation": found.implementation or None,
        "attn_asked": found.asked,
        "attn_function": found.function or None,
        "attn_why": found.problem or found.why,
    }


def _kernels(spec: Spec, role: RoleName, spec_dir: Path, elsewhere: bool) -> dict[str, str | None]:
    """Return what norms, gated MLPs and rotations will compute with; null where the engine brings its own."""
    found = role_kernels(spec, role, spec_dir, elsewhere=elsewhere)
    if found is None:
        return dict.fromkeys(("kernels", "kernels_asked", "kernels_why"))
    return {"kernels": found.kernels, "kernels_asked": found.asked, "kernels_why": found.problem or found.why}
