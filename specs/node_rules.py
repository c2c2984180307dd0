"""Rules about hosts: which roles may lie on several, with which launchers, and what the hostfile must hold."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from specs.errors import Problem, SpecError
from specs.explain import show
from specs.hostfile import read_hostfile
from specs.schema import RoleName, RoleSection, Spec


def node_problems(spec: Spec) -> Iterator[Problem]:
    """What can be said without reading the hostfile."""
    sections = _sections(spec)
    for role, section in sections:
        if section.nodes > 1:
            yield from _role(role, section)
    cluster = spec.cluster
    far = [section for _, section in sections if section.nodes > 1]
    if cluster is not None:
        through_shell = any(_through_shell(section) for section in far)
        for key in sorted(cluster.model_fields_set):
            why = "every role has nodes = 1" if not far else "srun knows the hosts of its job"
            if not far or (key in ("hostfile", "remote_shell") and not through_shell):
                value = show(getattr(cluster, key))
                yield Problem(f"cluster.{key}", f"has no effect: {why}", "remove the key", value)
        if "remote_shell" in cluster.model_fields_set and not any("{host}" in word for word in cluster.remote_shell):
            hint = "write {host} where the host's name goes"
            yield Problem("cluster.remote_shell", "names no host", hint, show(cluster.remote_shell))
    if not (cluster and cluster.hostfile):
        unnamed = [role for role, section in sections if section.nodes > 1 and _through_shell(section)]
        if unnamed:
            hint = 'add hostfile = "hosts" under [cluster]: a file with a line `host slots=N` per node, this host first'
            yield Problem("cluster.hostfile", f"{unnamed[0]} has several nodes, and nothing names them", hint)


def hostfile_problems(spec: Spec, spec_dir: Path) -> list[Problem]:
    """What the hostfile lacks for this spec."""
    if spec.cluster is None or not spec.cluster.hostfile:
        return []
    path = spec_dir / Path(spec.cluster.hostfile).expanduser()
    try:
        hosts = read_hostfile(path)
    except SpecError as error:
        return error.problems
    problems = []
    for role, section in _sections(spec):
        if section.nodes == 1 or not _through_shell(section):
            continue
        if len(hosts) < section.nodes:
            named = f"{show(spec.cluster.hostfile)} names {len(hosts)}"
            hint = f"add hosts to it, or set {role}.nodes = {max(1, len(hosts))}"
            problems.append(Problem(f"{role}.nodes", named, hint, str(section.nodes)))
        wanted = section.processes // section.nodes
        for host in hosts[: section.nodes]:
            if host.slots < wanted:
                message = f"{wanted} of them go to each node, and {host.name} has slots={host.slots}"
                hint = "raise slots in the hostfile, or use more nodes"
                problems.append(Problem(f"{role}.processes", message, hint, str(section.processes)))
    return problems


def _role(role: RoleName, section: RoleSection) -> Iterator[Problem]:
    key, value = f"{role}.nodes", str(section.nodes)
    if role in ("rollout", "reward"):
        yield Problem(key, f"the {role} role stays on the driver's host", "remove the key", value)
        return
    if section.processes % section.nodes:
        message = f"{section.processes} processes cannot be shared evenly by {section.nodes} nodes"
        hint = f"use a multiple of {section.nodes}, e.g. {_next_multiple(section.processes, section.nodes)}"
        yield Problem(f"{role}.processes", message, hint, str(section.processes))
    if section.launcher == "python":
        hint = f'write "torchrun", "deepspeed" or, inside a SLURM job, "srun" as {role}.launcher'
        yield Problem(f"{role}.launcher", f"starts processes on this host only, and {key} is {value}", hint, '"python"')


def _through_shell(section: RoleSection) -> bool:
    return section.launcher in ("torchrun", "deepspeed")


def _next_multiple(number: int, of: int) -> int:
    return -(-number // of) * of


def _sections(spec: Spec) -> list[tuple[RoleName, RoleSection]]:
    """Roles as the person wrote them: a reference shaped like the actor is not one of them."""
    written: list[tuple[RoleName, RoleSection | None]] = [("actor", spec.actor), ("ref", spec.ref)]
    written += [("rollout", spec.rollout), ("reward", spec.reward)]
    return [(role, section) for role, section in written if section is not None]
