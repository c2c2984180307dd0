"""The hosts of a run: a file with a line `host slots=N` for each, as DeepSpeed and MPI write it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from rlctl.models.paths import not_found
from specs.errors import NotHere, Problem, SpecError
from specs.rules.node_rules import through_shell
from specs.schema.spec import Spec
from specs.text import show

_LINE = re.compile(r"([A-Za-z0-9][A-Za-z0-9._:-]*)\s+slots=([1-9][0-9]*)", re.ASCII)


@dataclass(frozen=True)
class Host:
    """A host by its name or address, and how many processes of a role it takes."""

    name: str
    slots: int


def hosts_of(spec: Spec, spec_dir: Path, *, elsewhere: bool = False) -> list[Host]:
    """Hosts that the spec's hostfile names; none without one, and none of one that is not on this machine when the run
    is for machines `elsewhere`. Raises SpecError, which names line and text."""
    if spec.cluster is None or not spec.cluster.hostfile:
        return []
    path = spec_dir / Path(spec.cluster.hostfile).expanduser()
    try:
        return read_hostfile(path)
    except FileNotFoundError:
        problem = not_found("cluster.hostfile", "no such file", spec.cluster.hostfile)
        if elsewhere and isinstance(problem, NotHere):
            return []
        raise SpecError([problem]) from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise SpecError([Problem("cluster.hostfile", f"cannot be read: {reason}", value=f'"{path}"')]) from None


def read_hostfile(path: Path) -> list[Host]:
    """Hosts in the order of the file; `#` starts a comment. Raises SpecError, which names line and text, OSError and
    UnicodeDecodeError."""
    text = path.read_text(encoding="utf-8")
    hosts: dict[str, Host] = {}
    problems = []
    for number, line in enumerate(text.splitlines(), start=1):
        wanted = line.partition("#")[0].strip()
        if not wanted:
            continue
        found = _LINE.fullmatch(wanted)
        if found is None:
            problems.append(_problem(path, number, f"`{wanted}` is not a host", "write `host slots=N`, N at least 1"))
        elif found[1] in hosts:
            problems.append(_problem(path, number, f"{found[1]} is listed twice", "give each host one line"))
        else:
            hosts[found[1]] = Host(found[1], int(found[2]))
    if problems:
        raise SpecError(problems)
    return list(hosts.values())


def hostfile_problems(spec: Spec, spec_dir: Path) -> list[Problem]:
    """What the hostfile lacks for this spec."""
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
        first = section.hosts.start
        if len(hosts) < section.hosts.stop:
            named = f"{show(spec.cluster.hostfile)} names {len(hosts)}"
            after = f", and {first} come before it" if first else ""
            hint = f"add hosts to it, or set {role}.nodes = {max(1, len(hosts) - first)}"
            problems.append(Problem(f"{role}.nodes", named + after, hint, str(section.nodes)))
        wanted = section.processes // section.nodes
        for host in hosts[first : section.hosts.stop]:
            if host.slots < wanted:
                message = f"{wanted} of them go to each node, and {host.name} has slots={host.slots}"
                hint = "raise slots in the hostfile, or use more nodes"
                problems.append(Problem(f"{role}.processes", message, hint, str(section.processes)))
            elif host.slots < len(section.devices):
                message = f"it names {len(section.devices)} GPUs of each node, and {host.name} has slots={host.slots}"
                hint = "raise slots in the hostfile if it has more, or use hosts with as many GPUs"
                problems.append(Problem(f"{role}.devices", message, hint, show(section.devices)))
    return problems


def hostfile_warnings(spec: Spec, spec_dir: Path) -> list[Problem]:
    """Hosts, and GPUs of hosts, that the file names and nothing uses. `slots` are GPUs where a role has GPUs."""
    cluster, sections = spec.cluster, spec.sections()
    if cluster is None or not cluster.hostfile or not any(through_shell(*one) for one in sections):
        return []
    try:
        hosts = hosts_of(spec, spec_dir)
    except SpecError:
        return []  # said as a problem
    used = {number for _, section in sections for number in section.hosts}
    named = frozenset().union(*(spec.gpus(role) for role in spec.roles))
    unused = [host for number, host in enumerate(hosts) if number not in used]
    problems = []
    if unused:
        kind = "GPUs" if named else "slots"
        message = f"no role is on {', '.join(host.name for host in unused)}: {sum(h.slots for h in unused)} {kind} idle"
        hint = "raise `nodes` of a role, or remove the lines"
        problems.append(Problem("cluster.hostfile", message, hint, show(cluster.hostfile)))
    for number in sorted({number for number, _ in named} & set(range(len(hosts)))):
        count = sum(node == number for node, _ in named)
        if count < hosts[number].slots:
            message = f"{hosts[number].name} has slots={hosts[number].slots}, and roles name {count} GPUs there"
            hint = f"{hosts[number].slots - count} are idle: name them in `devices`, or lower slots"
            problems.append(Problem("cluster.hostfile", message, hint, show(cluster.hostfile)))
    return problems


def _problem(path: Path, number: int, message: str, hint: str) -> Problem:
    return Problem("cluster.hostfile", f"line {number}: {message}", hint, f'"{path}"')
