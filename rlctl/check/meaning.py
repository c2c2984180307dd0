"""Say what a spec means, in plain values: roles, the placement of their ranks, the reference, the arithmetic of a step.

It is what `rlctl check-config --json` prints, and what `rlctl/check/tables.py` shows."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlctl.models.paths import resolve_model
from rlctl.models.run_export import RunExport
from rlctl.models.tokenizer_files import reference_of
from rlctl.preflight.interpreters import SHOWN, Interpreter, look_at
from rlctl.preflight.role_choices import role_attention, role_kernels
from rlctl.processes.placement import Plan
from specs.rules.transport_rules import choose_transport
from specs.schema.engines.engine_table import engine_of, not_known
from specs.schema.rank_groups import hosts_of_rank, mesh_of, shard_groups
from specs.schema.recipes import RlSpec, RowsSpec, sampling_of
from specs.schema.roles import REF, ROLES, ROLLOUT, RoleName
from specs.schema.spec import Spec

if TYPE_CHECKING:
    from rlctl.check.findings import Findings


def as_dict(findings: Findings, spec_path: Path) -> dict[str, Any]:
    """Return the findings as JSON. `roles`, `placement` and `batch` are empty where the spec could not be read."""
    spec, plan, probe = findings.spec, findings.plan, findings.probe
    found: dict[str, Any] = {
        "ok": findings.ok,
        "problems": [asdict(problem) for problem in findings.problems],
        "warnings": [asdict(problem) for problem in findings.warnings],
        "notes": findings.notes,
        "roles": {},
        "probe": probe is not None,
        **{"placement": {}, "hosts": [], "batch": {}, "reference": {}},
        "example": [[{"text": text, "kind": kind} for text, kind in sequence] for sequence in findings.rows.example],
        "reward_functions": [asdict(call) for call in findings.calls],
        "environments": [],
        "sync": {},
    }
    if spec is None:
        return found
    found |= {"batch": _batch(spec), "reference": _reference(spec), "environments": _environments(spec, findings)}
    if (sampling := sampling_of(spec)) is not None:
        transport, why = choose_transport(sampling)
        found["sync"] = {"transport": transport, "why": why, "to": _links(spec, plan) if plan else []}
    if plan is not None:
        found |= {"placement": _placement(spec), "hosts": _hosts(spec, plan)}
        found["roles"] = roles(spec, plan, spec_path.absolute().parent, elsewhere=findings.elsewhere)
    if probe:
        from rlctl.check.meta_report import role_json

        for role, probed in probe.found.items():
            found["roles"][role] |= role_json(probe.asked.get(role, {}), probed)
    return found


def roles(spec: Spec, plan: Plan, spec_dir: Path, *, elsewhere: bool = False) -> dict[str, dict[str, Any]]:
    """Return by role where it runs and what it holds. A role that holds only the tokenizer has a model but
    no engine."""
    return {placed.role: _role(spec, plan, placed.role, spec_dir, elsewhere) for placed in plan.roles}


def _role(spec: Spec, plan: Plan, name: RoleName, spec_dir: Path, elsewhere: bool) -> dict[str, Any]:
    placed, section = plan.role(name), spec.role(name)
    engine = engine_of(section) if ROLES[name].holds_model else None
    attention = role_attention(spec, name, spec_dir, elsewhere=elsewhere)
    kernels = role_kernels(spec, name, spec_dir, elsewhere=elsewhere)
    own = look_at(placed.python) if section.python else Interpreter()
    installed = {name: own.versions[name] for name in SHOWN if name in own.versions}
    return {
        "model": str(RunExport.of(spec.model_path(name)) or resolve_model(spec.model_path(name), spec_dir)),
        "engine": engine.kind if engine else None,
        "dtype": spec.dtype(name) if engine else None,
        "dtype_asked": getattr(section, "dtype", None) if engine else None,
        # What will be in effect, null where only the engine knows or there is none, and what will be called then.
        "attn_implementation": (attention.implementation or None) if attention else None,
        "attn_asked": attention.asked if attention else None,
        "attn_function": (attention.function or None) if attention else None,
        "attn_why": attention.problem or attention.why if attention else None,
        # What norms, gated MLPs and rotations will compute with; null where the engine brings its own.
        "kernels": kernels.implementation if kernels else None,
        "kernels_asked": kernels.asked if kernels else None,
        "kernels_why": kernels.problem or kernels.why if kernels else None,
        "launcher": placed.launcher,
        "processes": placed.processes,
        "nodes": placed.nodes,
        "devices": list(placed.devices),
        "threads": placed.threads,
        "python": placed.python,
        "versions": {"python": own.python, **installed} if own.python else {},  # of an interpreter of its own
        "not_known": [] if engine is None else not_known(engine),  # what its table leaves open, in words
    }


def _environments(spec: Spec, findings: Findings) -> list[dict[str, Any]]:
    """Return each environment of the spec, and under `tried` what was found of it, null where it was not tried."""
    sampling = sampling_of(spec)
    tried = {one.key: asdict(one) for one in findings.environments}
    sections = sampling.environments_by_key if sampling is not None else {}
    return [section.model_dump(mode="json") | {"tried": tried.get(key)} for key, section in sections.items()]


def _reference(spec: Spec) -> dict[str, Any]:
    """Say whether the run needs a reference model, whether one is loaded, which, and why."""
    model, why = reference_of(spec)
    placed = spec.role(REF) if model else None
    engine = engine_of(placed) if placed else None
    return {
        "needed": spec.needs_ref,
        "loaded": bool(model),
        "model": model,
        "why": why,
        "engine": engine.kind if engine else "",
        "devices": list(placed.devices) if placed else [],
    }


def _hosts(spec: Spec, plan: Plan) -> list[dict[str, Any]]:
    """Return each host of the run and who is there: role → ranks and the numbers of their GPUs."""
    found: dict[int, dict[str, Any]] = {}
    for role in plan.roles:
        remote = {node.node_rank: node.host for node in role.remote}
        for node, number in enumerate(spec.role(role.role).hosts):
            name = remote.get(node, "this host" if number == 0 else f"node {number}")
            held = {"ranks": list(role.ranks_of(node)), "devices": list(role.devices)}
            found.setdefault(number, {"number": number, "host": name, "roles": {}})["roles"][role.role] = held
    return [found[number] for number in sorted(found)]


def _links(spec: Spec, plan: Plan) -> list[dict[str, Any]]:
    """Return the hosts that weights go to, from the actor's rank 0 on this host, and how many replicas have their
    process there."""
    section = spec.role(ROLLOUT)
    found = Counter(hosts_of_rank(section, rank)[0] for rank in range(section.processes))
    names = {host["number"]: host["host"] for host in _hosts(spec, plan)}
    return [{"host": names[number], "replicas": replicas} for number, replicas in found.items()]


def _placement(spec: Spec) -> dict[str, dict[str, Any]]:
    """Return by role its mesh and the place of every rank, for roles whose model or samples are sharded; null where the
    engine does not say."""
    found: dict[str, dict[str, Any]] = {}
    for name in spec.roles:
        section = spec.role(name)
        if (mesh := mesh_of(section)) is not None and mesh.is_sharded:
            listed = [asdict(rank) for group in shard_groups(section) for rank in group.ranks]
            axes = {"replicate": mesh.replicate, "shard": mesh.shard, "sequence": mesh.sequence}
            found[name] = {**axes, "ranks": listed}
        elif mesh is None and engine_of(section) is not None:
            found[name] = {"replicate": None, "shard": None, "sequence": None, "ranks": []}
    return found


def _batch(spec: Spec) -> dict[str, int]:
    """Return the arithmetic of a step and of the run."""
    drawn: dict[str, int] = {}
    if isinstance(spec, RlSpec):
        drawn = {
            "prompts_per_step": spec.data.prompts_per_step,
            "group_size": spec.algorithm.group_size,
            "epochs_per_step": spec.algorithm.epochs_per_step,
        }
    elif isinstance(spec, RowsSpec):
        drawn = {"rows_per_step": spec.data.rows_per_step, "sequences_per_row": spec.sequences_per_row}
    return {
        **drawn,
        "samples_per_step": spec.samples_per_step,
        "mini_batches_per_step": spec.mini_batches_per_step,
        "samples_per_mini_batch": spec.samples_per_step // spec.mini_batches_per_step,
        "steps": spec.run.steps,
        "optimizer_steps": spec.optimizer_steps(spec.lead),
        **{f"{role}_optimizer_steps": spec.optimizer_steps(role) for role in spec.losses if role != spec.lead},
        "max_sequence_tokens": spec.max_sequence_tokens,
        "max_tokens_per_step": spec.samples_per_step * spec.max_sequence_tokens,
        "micro_batch_tokens": spec.lead_section.micro_batch_tokens,
        "sequence_parallel": spec.lead_section.sequence_parallel,
    }
