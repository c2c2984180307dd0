"""Other hosts, before a run starts anything on them: this host's address for them, and whether each can do its part."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rlctl import __version__
from rlctl.preflight.hostfile import read_hostfile
from rlctl.processes.launch import remote_script
from rlctl.processes.placement import Plan, RemoteNode, make_plan
from rlctl.processes.remote_check import MARK
from specs.errors import Problem, SpecError
from specs.schema.sections import ClusterSection
from specs.schema.spec import Spec
from workers.network import address_towards

PROBE_TIMEOUT_S = 20.0
CLOCKS_APART_S = 60.0  # longer than an answer takes


def plan_for_hosts(spec: Spec, spec_dir: Path, run_dir: Path) -> Plan:
    """The plan of a run that is about to start. With roles on several hosts it names this host's address, and every
    host has been asked (all at once, at most PROBE_TIMEOUT_S). Raises SpecError."""
    _check_slurm(spec, os.environ)
    if not any(spec.role(name).leaves_host for name in spec.roles):
        return make_plan(spec, spec_dir)
    plan = make_plan(spec, spec_dir, address=_own_address(spec, spec_dir))
    _check_hosts(plan, [os.getcwd(), str(spec_dir), str(_existing(run_dir))])
    return plan


def _own_address(spec: Spec, spec_dir: Path) -> str:
    """This host's IPv4 address for the others: `cluster.address`, else the one on the way to the first of them."""
    cluster = spec.cluster or ClusterSection()
    target, key = cluster.address, "cluster.address"
    try:
        if target:
            address = socket.gethostbyname(target)
        elif cluster.hostfile:
            hosts = read_hostfile(spec_dir / Path(cluster.hostfile).expanduser())
            target, key = hosts[1].name, "cluster.hostfile"
            address = address_towards(target)
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


def _check_slurm(spec: Spec, env: Mapping[str, str]) -> None:
    """srun works inside a SLURM job, from its first host, on as many hosts as the job has."""
    roles = [name for name in spec.roles if spec.role(name).launcher == "srun"]
    if not roles:
        return
    key = f"{roles[0]}.launcher"
    if not env.get("SLURM_JOB_ID"):
        hint = "run it from a batch script (rlctl init --launcher slurm writes one), or use another launcher"
        raise SpecError([Problem(key, "this is not a SLURM job", hint, '"srun"')])
    has = int(env.get("SLURM_JOB_NUM_NODES", env.get("SLURM_NNODES", "1")))
    short = [name for name in roles if spec.role(name).nodes > has]
    if short:
        hint = f"ask for more with #SBATCH --nodes, or set {short[0]}.nodes = {has}"
        asked = str(spec.role(short[0]).nodes)
        raise SpecError([Problem(f"{short[0]}.nodes", f"the SLURM job has {has}", hint, asked)])


def _check_hosts(plan: Plan, folders: Sequence[str]) -> None:
    """Ask every host that the remote shell leads to, with the interpreter of each role that runs there."""
    asked = {(node.host, role.python): node for role in plan.roles for node in role.remote}
    if not asked:
        return
    devices = {
        (node.host, role.python): role.devices
        for role in sorted(plan.roles, key=lambda role: max(role.devices, default=-1))  # the highest number counts
        for node in role.remote
    }
    with socket.create_server((plan.address, 0), backlog=len(asked)) as door, ThreadPoolExecutor(len(asked)) as pool:
        port = door.getsockname()[1]
        findings = pool.map(
            lambda item: _ask(item[1], item[0][1], (plan.address, port), folders, devices[item[0]]), asked.items()
        )
        problems = [found for found in findings if found is not None]
    if problems:
        raise SpecError(problems)


def _ask(
    node: RemoteNode, python: str, home: tuple[str, int], folders: Sequence[str], devices: Sequence[int]
) -> Problem | None:
    """What keeps a host from its part of the run, if anything."""
    command = (python, "-m", "rlctl.processes.remote_check", home[0], str(home[1]), *folders)
    script = remote_script({"PYTHONPATH": node.env["PYTHONPATH"], "PYTHONSAFEPATH": "1"}, command)
    try:
        done = subprocess.run(
            node.shell, input=script, capture_output=True, text=True, errors="replace", timeout=PROBE_TIMEOUT_S,
            start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        return Problem("cluster.remote_shell", f"cannot be started: {error.strerror}", "", node.shell[0])
    except subprocess.TimeoutExpired:
        return _problem(node, f"no answer within {PROBE_TIMEOUT_S:g} s", "")
    said = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if not said:
        words = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        return _problem(node, f"exit code {done.returncode}: {words[-1] if words else 'it said nothing'}", python)
    return problem_of(node, json.loads(said[-1].removeprefix(MARK)), home[0], devices)


def problem_of(
    node: RemoteNode, answer: Mapping[str, Any], address: str, devices: Sequence[int], *, now: float | None = None
) -> Problem | None:
    """What keeps a host that has answered (`remote_check.py`) from its part. `devices`: GPUs that a role has there."""
    if answer["version"] != __version__:
        return _problem(node, f"rlctl {answer['version']} is there, and {__version__} here", "")
    if answer["missing"]:
        hint = "all hosts need the same folders under the same names: a shared file system"
        return Problem("cluster.hostfile", f"there is no {answer['missing'][0]}", hint, node.host)
    if answer["dial"]:
        hint = "write the address at which it finds this host as cluster.address, and open its ports to it"
        return Problem("cluster.address", f"{node.host} cannot reach it: {answer['dial']}", hint, f'"{address}"')
    if answer["gpus"] is not None and max(devices, default=-1) >= answer["gpus"]:
        hint = "name GPUs that every node of the role has, or use other hosts"
        message = f"host {node.host} has {answer['gpus']} GPUs, and number {max(devices)} is asked for"
        return Problem("cluster.hostfile", message, hint, node.host)
    if abs(apart_s := answer["time"] - (time.time() if now is None else now)) > CLOCKS_APART_S:
        way = "ahead of" if apart_s > 0 else "behind"
        hint = "have its clock set (chrony, ntpd): what hosts write into shared folders is compared by time"
        message = f"the clock of host {node.host} is {abs(apart_s):,.0f} s {way} this host's"
        return Problem("cluster.hostfile", message, hint, node.host)
    return None


def _problem(node: RemoteNode, reason: str, python: str) -> Problem:
    missing = f"; {python} must exist there, with rlctl's folder, as on this host" if python else ""
    hint = f"try it by hand: echo hostname | {' '.join(node.shell)}{missing}"
    return Problem("cluster.hostfile", f"host {node.host} cannot be used: {reason}", hint, node.host)


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists: a run directory is made when the run starts."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
