"""Rules about hosts: which roles may lie on several, with which launchers, and what names them."""

from __future__ import annotations

from collections.abc import Iterator

from specs.errors import Problem
from specs.schema.role_section import Restartable, RoleSection
from specs.schema.roles import REWARD, ROLES, RoleName
from specs.schema.spec import Spec
from specs.schema.table import no_effect


def node_problems(spec: Spec) -> Iterator[Problem]:
    """Yield what keeps roles from several hosts."""
    for role, section in spec.sections():
        if section.nodes > 1:
            yield from _role(role, section)
        least = section.min_processes if isinstance(section, Restartable) else None
        if least is not None and least > section.processes:
            hint = f"use at most {section.processes}, or raise {role}.processes"
            yield Problem(f"{role}.min_processes", f"{role} has {section.processes} processes to begin with", hint)
    if spec.min_nodes is not None and spec.min_nodes > spec.lead_section.nodes:
        hint = f"use at most {spec.lead_section.nodes}, or raise {spec.lead}.nodes"
        yield Problem(f"{spec.lead}.min_nodes", f"{spec.lead} has {spec.lead_section.nodes} nodes to begin with", hint)
    yield from _cluster(spec)
    unplaced = [(role, section) for role, section in spec.sections() if through_shell(role, section)]
    if unplaced and (spec.cluster is None or spec.cluster.kind == "local"):
        role, section = unplaced[0]
        hint = 'write kind = "ray" (a Ray cluster) or kind = "slurm" (inside a SLURM job) under [cluster]'
        has = "has several nodes, and nothing provides them"
        has = has if section.nodes > 1 else "is on another node, and nothing provides it"
        yield Problem("cluster.kind", f"{role} {has}", hint)


def _cluster(spec: Spec) -> Iterator[Problem]:
    cluster, sections = spec.cluster, spec.sections()
    if cluster is None:
        return
    far = any(section.leaves_host for _, section in sections) or spec.min_nodes is not None
    for key in sorted(cluster.model_fields_set):
        if not far or (key == "address" and cluster.kind != "ray"):
            why = f'cluster.kind is "{cluster.kind}"' if far else "every role has nodes = 1"
            yield no_effect(f"cluster.{key}", why)


def _role(role: RoleName, section: RoleSection) -> Iterator[Problem]:
    key, processes, nodes = f"{role}.nodes", section.processes, section.nodes
    if not ROLES[role].spreads:
        yield Problem(key, f"the {role} role stays on the driver's host", "remove the key")
        return
    spanned = ROLES[role].samples and nodes % processes == 0  # by each replica: role_rules.py
    if processes % nodes and role != REWARD and not spanned:  # whose processes are as many as its nodes
        hint = f"use a multiple of {nodes}, e.g. {-(-processes // nodes) * nodes}"
        message = f"{processes} processes cannot be shared evenly by {nodes} nodes"
        yield Problem(f"{role}.processes", message, hint)
    if section.launcher == "python" and ROLES[role].together:
        hint = f'write "torchrun", "deepspeed" or, inside a SLURM job, "srun" as {role}.launcher'
        yield Problem(f"{role}.launcher", f"starts processes on this host only, and {key} is {nodes}", hint)


def through_shell(role: RoleName, section: RoleSection) -> bool:
    """Return whether a shell starts the role on its other hosts, rather than srun."""
    launchers = ("torchrun", "deepspeed") if ROLES[role].together else ("python",)
    return ROLES[role].spreads and section.leaves_host and section.launcher in launchers
