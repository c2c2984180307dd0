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
    """Yield what can be told without reading the hostfile."""
    sections = spec.sections()
    for role, section in sections:
        if section.nodes > 1:
            yield from _role(role, section)
        least = section.min_processes if isinstance(section, Restartable) else None
        if least is not None and least > section.processes:
            hint = f"use at most {section.processes}, or raise {role}.processes"
            message = f"{role} has {section.processes} processes to begin with"
            yield Problem(f"{role}.min_processes", message, hint, str(least))
    cluster = spec.cluster
    far = [section for _, section in sections if section.leaves_host]
    if cluster is not None:
        by_shell = any(through_shell(role, section) for role, section in sections)
        for key in sorted(cluster.model_fields_set):
            why = "every role has nodes = 1" if not far else "srun knows the hosts of its job"
            if not far or (key in ("hostfile", "remote_shell") and not by_shell):
                value = show(getattr(cluster, key))
                yield Problem(f"cluster.{key}", f"has no effect: {why}", "remove the key", value)
        if "remote_shell" in cluster.model_fields_set and not any("{host}" in word for word in cluster.remote_shell):
            hint = "write {host} where the host's name goes"
            yield Problem("cluster.remote_shell", "names no host", hint, show(cluster.remote_shell))
        if far and re.fullmatch(r"[^:\[\]]+:\d+", cluster.address):
            host = cluster.address.partition(":")[0]
            yield Problem("cluster.address", "holds a port too", f"write {show(host)}", show(cluster.address))
        if far and _LOOPBACK.fullmatch(cluster.address):
            hint = "name the address that `hostname -I` shows, or leave it out"
            yield Problem("cluster.address", "no other host can reach this one there", hint, show(cluster.address))
    if not (cluster and cluster.hostfile):
        unnamed = [(role, section) for role, section in sections if through_shell(role, section)]
        if unnamed:
            role, section = unnamed[0]
            hint = 'add hostfile = "hosts" under [cluster]: a file with a line `host slots=N` per node, this host first'
            has = "has several nodes, and nothing names them"
            has = has if section.nodes > 1 else "is on another node, and nothing names it"
            yield Problem("cluster.hostfile", f"{role} {has}", hint)


def _role(role: RoleName, section: RoleSection) -> Iterator[Problem]:
    key, value = f"{role}.nodes", str(section.nodes)
    if not ROLES[role].spreads:
        yield Problem(key, f"the {role} role stays on the driver's host", "remove the key", value)
        return
    if section.processes % section.nodes and role != REWARD:  # whose processes are as many as its nodes
        message = f"{section.processes} processes cannot be shared evenly by {section.nodes} nodes"
        hint = f"use a multiple of {section.nodes}, e.g. {_next_multiple(section.processes, section.nodes)}"
        yield Problem(f"{role}.processes", message, hint, str(section.processes))
    if section.launcher == "python" and ROLES[role].together:
        hint = f'write "torchrun", "deepspeed" or, inside a SLURM job, "srun" as {role}.launcher'
        yield Problem(f"{role}.launcher", f"starts processes on this host only, and {key} is {value}", hint, '"python"')


def through_shell(role: RoleName, section: RoleSection) -> bool:
    """Whether a remote shell starts the role on its other hosts."""
    launchers = ("torchrun", "deepspeed") if ROLES[role].together else ("python",)
    return ROLES[role].spreads and section.leaves_host and section.launcher in launchers


def _next_multiple(number: int, of: int) -> int:
    return -(-number // of) * of
