"""Rules about hosts: which roles may lie on several, with which launchers, and what names them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from specs.errors import Problem
from specs.schema.role_section import Restartable, RoleSection
from specs.schema.roles import REWARD, ROLES, RoleName
from specs.schema.spec import Spec
from specs.text import show

_LOOPBACK = re.compile(r"localhost|127\.[\d.]+|0\.0\.0\.0|\[?::1?\]?", re.IGNORECASE)


def node_problems(spec: Spec) -> Iterator[Problem]:
    """Yield what can be found without reading the hostfile."""
    for role, section in spec.sections():
        if section.nodes > 1:
            yield from _role(role, section)
        least = section.min_processes if isinstance(section, Restartable) else None
        if least is not None and least > section.processes:
            hint = f"use at most {section.processes}, or raise {role}.processes"
            yield Problem(f"{role}.min_processes", f"{role} has {section.processes} processes to begin with", hint)
    yield from _cluster(spec)
    unnamed = [(role, section) for role, section in spec.sections() if through_shell(role, section)]
    if unnamed and not (spec.cluster and spec.cluster.hostfile):
        role, section = unnamed[0]
        hint = 'add hostfile = "hosts" under [cluster]: a file with a line `host slots=N` per node, this host first'
        has = "has several nodes, and nothing names them"
        has = has if section.nodes > 1 else "is on another node, and nothing names it"
        yield Problem("cluster.hostfile", f"{role} {has}", hint)


def _cluster(spec: Spec) -> Iterator[Problem]:
    cluster, sections = spec.cluster, spec.sections()
    if cluster is None:
        return
    far = any(section.leaves_host for _, section in sections)
    by_shell = any(through_shell(role, section) for role, section in sections)
    for key in sorted(cluster.model_fields_set):
        if not far or (key in ("hostfile", "remote_shell") and not by_shell):
            why = "srun knows the hosts of its job" if far else "every role has nodes = 1"
            yield Problem(f"cluster.{key}", f"has no effect: {why}", "remove the key")
    if "remote_shell" in cluster.model_fields_set and not any("{host}" in word for word in cluster.remote_shell):
        yield Problem("cluster.remote_shell", "names no host", "write {host} where the host's name goes")
    if far and re.fullmatch(r"[^:\[\]]+:\d+", cluster.address):
        yield Problem("cluster.address", "holds a port too", f"write {show(cluster.address.partition(':')[0])}")
    if far and _LOOPBACK.fullmatch(cluster.address):
        hint = "name the address that `hostname -I` shows, or leave it out"
        yield Problem("cluster.address", "no other host can reach this one there", hint)


def _role(role: RoleName, section: RoleSection) -> Iterator[Problem]:
    key, processes, nodes = f"{role}.nodes", section.processes, section.nodes
    if not ROLES[role].spreads:
        yield Problem(key, f"the {role} role stays on the driver's host", "remove the key")
        return
    if processes % nodes and role != REWARD:  # whose processes are as many as its nodes
        hint = f"use a multiple of {nodes}, e.g. {-(-processes // nodes) * nodes}"
        message = f"{processes} processes cannot be shared evenly by {nodes} nodes"
        yield Problem(f"{role}.processes", message, hint)
    if section.launcher == "python" and ROLES[role].together:
        hint = f'write "torchrun", "deepspeed" or, inside a SLURM job, "srun" as {role}.launcher'
        yield Problem(f"{role}.launcher", f"starts processes on this host only, and {key} is {nodes}", hint)


def through_shell(role: RoleName, section: RoleSection) -> bool:
    """Return whether a remote shell starts the role on its other hosts."""
    launchers = ("torchrun", "deepspeed") if ROLES[role].together else ("python",)
    return ROLES[role].spreads and section.leaves_host and section.launcher in launchers
