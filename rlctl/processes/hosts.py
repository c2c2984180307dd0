"""Prepare for other hosts before a run starts: Ray or SLURM gives them, and each is checked for its part."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from rlctl.preflight.reward_files import scorer_code
from rlctl.processes.host_check import RemoteHost, check_hosts
from rlctl.processes.placement import Plan, RolePlan, make_plan
from rlctl.processes.remote_check import Questions, checksum_of, sizes_in
from rlctl.processes.role_configs import model_paths
from rlctl.processes.shells import Cluster, HostNeeds
from rlctl.processes.slurm import SlurmJob, check_slurm
from specs.rules.transport_rules import choose_transport
from specs.schema.rank_groups import nodes_of_a_process, processes_of_a_node
from specs.schema.recipes import sampling_of
from specs.schema.role_section import Restartable
from specs.schema.roles import ROLES, RoleName
from specs.schema.spec import Spec
from workers.grading.reward_sources import reward_sources


def plan_for_hosts(spec: Spec, spec_dir: Path, run_dir: Path) -> Plan:
    """Return the plan of a run that is about to start. With roles on several hosts it holds these, each checked; one
    that is not there yet is checked before its ranks start. What it waits for is on stderr. Raise SpecError."""
    check_slurm(spec, os.environ)
    if not any(spec.role(name).leaves_host for name in spec.roles):
        return make_plan(spec, spec_dir)
    cluster = _cluster(spec)
    try:
        say = partial(print, file=sys.stderr, flush=True)
        cluster.reserve(say)
        plan = make_plan(spec, spec_dir, address=cluster.address, names=cluster.names)
        hosts = remote_hosts(spec, plan, spec_dir, cluster.names)
        questions = _questions(spec, spec_dir, plan)
        with _marked(_written_to(spec, spec_dir, run_dir)) as files:
            ports = [0, *(role.meeting.port for role in plan.roles if role.meeting.port is not None)]
            now = replace(questions, shared=files, ports=ports)
            there = [host for host in hosts if host.name not in cluster.pending]
            check_hosts(there, cluster, now, spec.run.start_timeout_s, say)
    except BaseException:
        cluster.close()
        raise
    later = replace(questions, folders=[*questions.folders, str(run_dir.absolute())])
    checks = {(host.name, host.python): host.check(later) for host in hosts} if cluster.replaces else {}
    return replace(plan, roles=tuple(_checked(role, checks) for role in plan.roles), cluster=cluster)


def on_fewer_nodes(spec: Spec) -> list[str]:
    """Return settings by which a spec begins with the nodes that its cluster has, if these are fewer than it needs and
    no fewer than `actor.min_nodes`; none, where it begins as it is or not at all."""
    lead, least = spec.lead_section, spec.min_nodes
    if least is None or spec.cluster is None or spec.cluster.kind == "local":
        return []
    needs = host_needs(spec)
    fewer = sum(need.required for need in needs) - _cluster(spec).count(max(need.gpus for need in needs))
    if fewer <= 0 or lead.nodes - fewer < least:
        return []
    found, nodes = [], lead.nodes - fewer
    for name, section in spec.sections():
        if section.hosts == lead.hosts:
            processes, left = divmod(section.processes * nodes, section.nodes)
            if left:  # replicas that span nodes
                return []
            found += [f"{name}.nodes={nodes}", f"{name}.processes={processes}"]
        elif section.hosts.start >= lead.nodes:
            found.append(f"{name}.first_node={section.hosts.start - fewer}")
    return found


def _cluster(spec: Spec) -> Cluster:
    if spec.cluster is None or spec.cluster.kind != "ray":
        return SlurmJob(os.environ)
    from rlctl.processes.ray_cluster import RayCluster  # here: Ray is an extra

    return RayCluster(spec.cluster.address, host_needs(spec))


def host_needs(spec: Spec) -> list[HostNeeds]:
    """Return what each host of a run takes, by its number. The run begins without as many hosts as it can."""
    numbers = range(max(spec.role(name).hosts.stop for name in spec.roles))
    optional: set[int] = set()
    for number in reversed(numbers[1:]):
        if may_begin_without(spec, frozenset(optional | {number})):
            optional.add(number)
    gpus = {number: 0 for number in numbers}
    for name in spec.roles:
        for number in spec.role(name).hosts:
            gpus[number] = max(gpus[number], 1 + max(spec.role(name).devices, default=-1))
    return [HostNeeds(gpus[number], number not in optional) for number in numbers]


def _checked(role: RolePlan, checks: Mapping[tuple[str, str], tuple[str, ...]]) -> RolePlan:
    nodes = (replace(node, check=checks.get((node.host, role.python), ())) for node in role.remote)
    return replace(role, remote=tuple(nodes))


def may_begin_without(spec: Spec, hosts: frozenset[int]) -> bool:
    """Return whether the run can begin while these hosts (by their numbers) are missing."""
    for role in spec.roles:
        section = spec.role(role)
        span = nodes_of_a_process(section)
        parts = {section.hosts.index(number) // span for number in hosts.intersection(section.hosts)}
        gone = len(parts) * processes_of_a_node(section)
        least = section.min_processes if isinstance(section, Restartable) else None
        if gone and (least is None or section.processes - gone < least):
            return False
    return True


def _questions(spec: Spec, spec_dir: Path, plan: Plan) -> Questions:
    """Return the questions to every host."""
    models = {path for role, path in model_paths(spec, spec_dir).items() if spec.role(role).leaves_host}
    sizes = {path: sizes_in(path) for path in sorted(models) if os.path.isdir(path)}
    return Questions(plan.address, folders=[os.getcwd(), str(spec_dir)], models=sizes)


def _files_of(role: RoleName, spec: Spec, spec_dir: Path) -> dict[str, str]:
    """Files of the user's own that ranks of a role run, with their checksums."""
    paths = [*spec.own_functions.values()] if spec.learns(role) else []
    if ROLES[role].holds == "scorer":
        paths = [*scorer_code(spec).values()]
    files = [spec_dir / Path(path.rpartition(":")[0]).expanduser() for path in paths]
    sources = {os.path.abspath(source) for file in files for source in reward_sources(file) if source.is_file()}
    return {path: checksum_of(path) for path in sorted(sources)}


def _written_to(spec: Spec, spec_dir: Path, run_dir: Path) -> list[str]:
    """Return the folders that ranks of all hosts write to or read from, as far as they are there already."""
    sampling = sampling_of(spec)
    sent = sampling.sync.folder if sampling is not None and choose_transport(sampling)[0] == "folder" else ""
    folders = [run_dir, *([spec_dir / Path(sent).expanduser()] if sent else [])]
    return [str(_existing(folder)) for folder in folders]


def remote_hosts(spec: Spec, plan: Plan, spec_dir: Path, names: Sequence[str]) -> list[RemoteHost]:
    """Return every host but this one, once for each interpreter that roles have there."""
    found: dict[tuple[int, str], RemoteHost] = {}
    for role in plan.roles:
        far = [number for number in spec.role(role.role).hosts if number > 0]
        own = _files_of(role.role, spec, spec_dir) if far else {}
        for number in far:
            new = RemoteHost(number, names[number], role.python, role.env["PYTHONPATH"])
            known = found.get((number, role.python), new)
            devices, files = known.devices | set(role.devices), {**known.files, **own}
            found[number, role.python] = replace(known, devices=devices, files=files)
    return [*found.values()]


def _existing(folder: Path) -> Path:
    """Return the folder, or the nearest one above it that exists: a run directory is made when the run starts."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())


@contextmanager
def _marked(folders: Sequence[str]) -> Iterator[list[str]]:
    """Make an empty file in each folder, by which other hosts see that theirs is the same one; none where none can be
    made, which others report."""
    with ExitStack() as stack:
        files = []
        for folder in dict.fromkeys(folders):
            with suppress(OSError):
                files.append(stack.enter_context(tempfile.NamedTemporaryFile(prefix=".rlctl-", dir=folder)).name)
        yield files
