"""Prepare for other hosts before a run starts: this host's address for them, and whether each can do its part."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from rlctl import __version__
from rlctl.preflight.hostfile import hosts_of
from rlctl.preflight.reward_files import scorer_code
from rlctl.processes.host_check import RemoteHost, check_hosts
from rlctl.processes.placement import Plan, RolePlan, make_plan
from rlctl.processes.remote_check import Questions, checksum_of, sizes_in, this_machine
from rlctl.processes.role_configs import model_paths
from specs.errors import Problem, SpecError
from specs.rules.transport_rules import choose_transport
from specs.schema.recipes import sampling_of
from specs.schema.role_section import Restartable
from specs.schema.roles import ROLES, RoleName
from specs.schema.sections import ClusterSection
from specs.schema.spec import Spec
from workers.grading.reward_sources import reward_sources
from workers.network import address_towards


def plan_for_hosts(spec: Spec, spec_dir: Path, run_dir: Path) -> Plan:
    """Return the plan of a run that is about to start. With roles on several hosts it names this host's address, and
    every host has been checked. A host that may come late is checked again before its ranks start. Raise SpecError."""
    check_slurm(spec, os.environ)
    if not any(spec.role(name).leaves_host for name in spec.roles):
        return make_plan(spec, spec_dir)
    plan = make_plan(spec, spec_dir, address=_own_address(spec, spec_dir))
    hosts = remote_hosts(spec, plan, spec_dir)
    questions = _questions(spec, spec_dir, plan)
    with _marked(_written_to(spec, spec_dir, run_dir)) as files:
        ports = [0, *(role.meeting.port for role in plan.roles if role.meeting.port is not None)]
        now = Questions(**{**questions, "shared": files, "ports": ports})
        unreached = check_hosts(hosts, now, partial(may_begin_without, spec))
    later = Questions(**{**questions, "folders": [*questions["folders"], str(run_dir.absolute())]})
    checks = {(host.name, host.python): host.check(later) for host in hosts if host.name in unreached}
    return replace(plan, roles=tuple(_checked(role, checks) for role in plan.roles), unreached=unreached)


def _checked(role: RolePlan, checks: Mapping[tuple[str, str], tuple[str, ...]]) -> RolePlan:
    nodes = (replace(node, check=checks.get((node.host, role.python), ())) for node in role.remote)
    return replace(role, remote=tuple(nodes))


def may_begin_without(spec: Spec, hosts: frozenset[int]) -> bool:
    """Return whether the run can begin while these hosts (by their numbers) are missing."""
    for role in spec.roles:
        section = spec.role(role)
        gone = len(hosts.intersection(section.hosts)) * (section.processes // section.nodes)
        least = section.min_processes if isinstance(section, Restartable) else None
        if gone and (least is None or section.processes - gone < least):
            return False
    return True


def _own_address(spec: Spec, spec_dir: Path) -> str:
    """Return this host's IPv4 address for the others: `cluster.address`, else the one on the way to the first."""
    cluster = spec.cluster or ClusterSection()
    target, key = cluster.address, "cluster.address"
    try:
        if target:
            address = socket.gethostbyname(target)
        elif cluster.hostfile:
            hosts = hosts_of(spec, spec_dir)
            key = "cluster.hostfile"
            ways = [(host.name, way) for host in hosts[1:] if (way := _way_to(host.name))]
            target, address = ways[0] if ways else (hosts[1].name, address_towards(hosts[1].name))
        else:  # srun: the hosts of a job know each other's names
            target = socket.gethostname()
            address = socket.gethostbyname(target)
    except OSError as error:
        hint = "write the address at which the other hosts find this one as cluster.address"
        raise SpecError([Problem(key, f"cannot resolve or route to {target}: {error}", hint)]) from None
    with socket.socket() as probe:
        try:
            probe.bind((address, 0))
        except OSError as error:
            hint = "write the address of an interface of the host where `rlctl train` runs"
            reason = f"is not an address of this host: {error.strerror}"
            raise SpecError([Problem("cluster.address", reason, hint, f'"{target}"')]) from None
    return address


def check_slurm(spec: Spec, env: Mapping[str, str]) -> None:
    """Raise SpecError where srun cannot work: it needs a SLURM job with as many hosts as the spec asks for."""
    roles = [name for name in spec.roles if spec.role(name).launcher == "srun"]
    if not roles:
        return
    key = f"{roles[0]}.launcher"
    if not env.get("SLURM_JOB_ID"):
        hint = "run it from a batch script (rlctl init --launcher slurm writes one), or use another launcher"
        raise SpecError([Problem(key, "this is not a SLURM job", hint, '"srun"')])
    counts = ("SLURM_JOB_NUM_NODES_HET_GROUP_0", "SLURM_JOB_NUM_NODES", "SLURM_NNODES")  # srun's is the first part
    has = int(next((env[name] for name in counts if name in env), "1"))
    short = [name for name in roles if spec.role(name).nodes > has]
    if short:
        hint = f"ask for more with #SBATCH --nodes, or set {short[0]}.nodes = {has}"
        nodes = str(spec.role(short[0]).nodes)
        listed = env.get("SLURM_JOB_NODELIST_HET_GROUP_0", env.get("SLURM_JOB_NODELIST", ""))
        named = f": {listed}" if listed else ""
        raise SpecError([Problem(f"{short[0]}.nodes", f"the SLURM job has {has}{named}", hint, nodes)])


def _questions(spec: Spec, spec_dir: Path, plan: Plan) -> Questions:
    """Return the questions to every host."""
    models = {path for role, path in model_paths(spec, spec_dir).items() if spec.role(role).leaves_host}
    return Questions(
        version=__version__,
        machine=this_machine(),
        address=plan.address,
        ports=[],
        folders=[os.getcwd(), str(spec_dir)],
        shared=[],
        models={path: sizes_in(path) for path in sorted(models) if os.path.isdir(path)},
        files={},
        host="",
        gpus=0,
    )


def _way_to(host: str) -> str:
    """Return this host's address on the way to another; empty where there is none."""
    with suppress(OSError):
        return address_towards(host)
    return ""


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


def remote_hosts(spec: Spec, plan: Plan, spec_dir: Path) -> list[RemoteHost]:
    """Return every host but this one, once for each interpreter that roles have there. The ranks of `srun` are on the
    hosts of the job in their order, which a step of one task finds by number."""
    found: dict[tuple[int, str], RemoteHost] = {}
    for role in sorted(plan.roles, key=lambda role: role.launcher == "srun"):  # those with hosts by name come first
        hosts = spec.role(role.role).hosts
        far: list[tuple[int, str, tuple[str, ...]]]
        if role.launcher == "srun":
            step = ("srun", "--overlap", "--nodes=1", "--ntasks=1")
            far = [(number, f"{number} of the job", (*step, f"--relative={number}", "sh")) for number in hosts[1:]]
        else:
            far = [(hosts[node.node_rank], node.host, node.shell) for node in role.remote]
        own = _files_of(role.role, spec, spec_dir) if far else {}
        for number, name, shell in far:
            new = RemoteHost(number, name, shell, role.python, role.env["PYTHONPATH"])
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
