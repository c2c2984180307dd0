"""The hosts of a run: a file with a line `host slots=N` for each, as DeepSpeed and MPI write it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from rlctl.models.paths import not_found
from specs.errors import NotHere, Problem, SpecError
from specs.rules.all_rules import with_values
from specs.rules.node_rules import through_shell
from specs.schema.spec import Spec
from specs.text import show

_LINE = re.compile(r"([A-Za-z0-9][A-Za-z0-9._:-]*)\s+slots=([1-9][0-9]*)", re.ASCII)


@dataclass(frozen=True)
class Host:
    """A host by its name or address, and how many processes of a role fit there."""

    name: str
    slots: int


def hosts_of(spec: Spec, spec_dir: Path, *, elsewhere: bool = False) -> list[Host]:
    """Return the hosts that the spec's hostfile names; none without one, and none of one that is not on this machine
    when the run is for machines `elsewhere`. Raises SpecError, which names line and text."""
    if spec.cluster is None or not spec.cluster.hostfile:
        return []
    path = spec_dir / Path(spec.cluster.hostfile).expanduser()
    try:
        return read_hostfile(path)
    except FileNotFoundError:
        problem = not_found("cluster.hostfile", "file", path, spec.cluster.hostfile)
        if elsewhere and isinstance(problem, NotHere):
            return []
        raise SpecError(with_values(spec, [problem])) from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise SpecError([Problem("cluster.hostfile", f"cannot be read: {reason}", value=f'"{path}"')]) from None


def read_hostfile(path: Path) -> list[Host]:
    """Return hosts in the order of the file; `#` starts a comment. Raises SpecError, which names line and text,
    OSError and UnicodeDecodeError."""
    hosts: dict[str, Host] = {}
    problems = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        wanted = line.partition("#")[0].strip()
        found = _LINE.fullmatch(wanted)
        if found is not None and found[1] not in hosts:
            hosts[found[1]] = Host(found[1], int(found[2]))
        elif found is not None:
            message = f"line {number}: {found[1]} is listed twice"
            problems.append(Problem("cluster.hostfile", message, "give each host one line", f'"{path}"'))
        elif wanted:
            message = f"line {number}: `{wanted}` is not a host"
            problems.append(Problem("cluster.hostfile", message, "write `host slots=N`, N at least 1", f'"{path}"'))
    if problems:
        raise SpecError(problems)
    return list(hosts.values())


def hostfile_problems(spec: Spec, spec_dir: Path) -> list[Problem]:
    """Return what the hostfile lacks for this spec."""
    if spec.cluster is None or not spec.cluster.hostfile:
        return []
    try:
        hosts = hosts_of(spec, spec_dir)
    except SpecError as error:
        return error.problems
    problems = []
    for role, section in spec.sections():
        if not through_shell(role, section):
            continue
        first, wanted = section.hosts.start, section.processes // section.nodes
        if len(hosts) < section.hosts.stop:
            message = f"{show(spec.cluster.hostfile)} names {len(hosts)}"
            message += f", and {first} come before it" if first else ""
            hint = f"add hosts to it, or set {role}.nodes = {max(1, len(hosts) - first)}"
            problems.append(Problem(f"{role}.nodes", message, hint))
        for host in hosts[first : section.hosts.stop]:
            if host.slots < wanted:
                message = f"{wanted} of them go to each node, and {host.name} has slots={host.slots}"
                hint = "raise slots in the hostfile, or use more nodes"
                problems.append(Problem(f"{role}.processes", message, hint))
            elif host.slots < len(section.devices):
                message = f"it names {len(section.devices)} GPUs of each node, and {host.name} has slots={host.slots}"
                hint = "raise slots in the hostfile if it has more, or use hosts with as many GPUs"
                problems.append(Problem(f"{role}.devices", message, hint))
    return problems
