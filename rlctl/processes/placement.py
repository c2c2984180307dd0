"""Plan where a run's processes go: per role its command, environment, devices, threads. Start and change nothing."""

from __future__ import annotations

import base64
import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from rlctl.models.hardware import gpus_left
from rlctl.processes.shells import Cluster
from specs.errors import Problem, SpecError
from specs.packages import package_path
from specs.rules.transport_rules import ALLOCATOR_VARIABLES, choose_transport
from specs.schema.rank_groups import nodes_of_a_process, processes_of_a_node
from specs.schema.recipes import RlSpec, sampling_of
from specs.schema.rewards import Judge
from specs.schema.role_section import RoleSection
from specs.schema.roles import ACTOR, REWARD, ROLES, ROLLOUT, RoleName
from specs.schema.sections import ClusterSection
from specs.schema.spec import Spec

LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Between two small operations a thread waits for the next by spinning this often, some tens of microseconds, before it
# sleeps: without it decoding takes 1.5x and training 1.2x as long; idle roles still sleep.
SPIN_COUNT = "20000"
LOOPBACK = "127.0.0.1"
# Stand-ins in commands until a run starts: a port that is free then, and this host's address for the others.
FREE_PORT, UNKNOWN_ADDRESS = "{port}", "{address}"
_CGROUP_LIMIT = Path("/sys/fs/cgroup/cpu.max")
_SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


@dataclass(frozen=True)
class RemoteNode:
    """A role's processes on another host, which is number `number` of the run. `command` starts them all, or, as
    `RolePlan.command`, one of them, after `check`, if there is one. `node_rank` counts the role's nodes, from 0."""

    host: str
    node_rank: int
    number: int
    command: tuple[str, ...]
    env: dict[str, str]
    check: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rendezvous:
    """The address at which the ranks of a group first meet. `port` None: one that is free when they start, on one
    host."""

    address: str = LOOPBACK
    port: int | None = None

    @property
    def port_text(self) -> str:
        return FREE_PORT if self.port is None else str(self.port)


@dataclass(frozen=True)
class RolePlan:
    """One role. `command` starts one process (`python`), all of this host (`torchrun`, `deepspeed`) or all there are
    (`srun`); `remote` has those of other hosts. `env` is what rlctl adds. Ranks count node by node."""

    role: RoleName
    processes: int
    launcher: str
    python: str
    command: tuple[str, ...]
    env: dict[str, str]
    devices: tuple[int, ...]
    threads: int
    world_size_of_group: int
    nodes: int = 1
    nodes_of_rank: int = 1
    meeting: Rendezvous = field(default_factory=Rendezvous)
    remote: tuple[RemoteNode, ...] = ()

    @property
    def on_each(self) -> int:
        """Return how many processes are on each node that has any."""
        return max(1, self.processes // self.nodes)

    @property
    def here(self) -> tuple[int, ...]:
        """Return the ranks on this host, as far as rlctl places them: srun has all."""
        return tuple(rank for rank in range(self.processes) if self.remote_of(rank) is None)

    def part_of(self, node: RemoteNode) -> int:
        """Return which part of a rank a node holds; 0: the rank itself, or whole ones."""
        return node.node_rank % self.nodes_of_rank

    def ranks_of(self, node: int) -> tuple[int, ...]:
        """Return the ranks on node `node` of the role, or the one that it holds a part of."""
        first = node // self.nodes_of_rank * self.on_each
        return tuple(range(first, first + self.on_each))

    def remotes_of(self, rank: int) -> list[RemoteNode]:
        """Return the other hosts that a rank is planned on: this one and those that srun picks are none."""
        first = rank // self.on_each * self.nodes_of_rank
        return [remote for remote in self.remote if 0 <= remote.node_rank - first < self.nodes_of_rank]

    def remote_of(self, rank: int) -> RemoteNode | None:
        """Return the other host that a rank's process is planned on. None: this host, or one that srun picks."""
        return next((remote for remote in self.remotes_of(rank) if not self.part_of(remote)), None)

    def host_of(self, rank: int) -> str:
        """Return the name of the other host that a rank is planned on; empty: this host, or one that srun picks."""
        remote = self.remote_of(rank)
        return remote.host if remote else ""


@dataclass(frozen=True)
class Plan:
    """All roles in the order in which they start. `colocated`: trainers and rollouts take turns on their devices.
    `address`: this host's, where ranks on other hosts find it; empty: there are none. `cluster`: the other hosts, of a
    run that is about to start."""

    roles: tuple[RolePlan, ...]
    colocated: bool
    address: str = ""
    cluster: Cluster | None = None

    def role(self, name: str) -> RolePlan:
        return next(plan for plan in self.roles if plan.role == name)


def make_plan(spec: Spec, spec_dir: Path, *, address: str = "", names: Sequence[str] = ()) -> Plan:
    """Plan a run of `spec`, whose relative paths start at `spec_dir`, on hosts with as many CPU cores each as this
    process may use. `address` is this host's for other hosts, `names` are those of all; unset: they are known when the
    run starts."""
    several = any(spec.role(name).leaves_host for name in spec.roles)
    beyond = (address or UNKNOWN_ADDRESS) if several else ""
    ahead = isinstance(spec, RlSpec) and spec.rollout.max_staleness > 0
    at_once = 2 if ahead and not (spec.gpus(ACTOR) or spec.gpus(ROLLOUT)) else 1
    for_transport, sampling = {}, sampling_of(spec)
    terms = sampling.reward_terms if sampling is not None else ()
    named = {term.key_env for term in terms if isinstance(term, Judge)}
    keys = {name: os.environ[name] for name in named & os.environ.keys()}
    if sampling is not None and choose_transport(sampling)[0] == "cuda_ipc":
        seen = [_visible(device, ACTOR) for device in sampling.actor.devices]
        if parts := [name for name in seen if name.startswith("MIG-")]:
            message = "CUDA IPC has not been tried on a part of a GPU (MIG), as CUDA_VISIBLE_DEVICES names one here"
            raise SpecError([Problem("sync.transport", message, 'write "shm" or "auto"', f"cuda_ipc on {parts[0]}")])
        for_transport = _without_expandable_segments()
    port = (spec.cluster or ClusterSection()).port
    planner = _Planner(spec_dir, usable_cores(), port, beyond, names, at_once, for_transport, keys)
    return Plan(tuple(planner.role(name, spec.role(name)) for name in spec.roles), spec.colocated, beyond)


def usable_cores() -> int:
    """Return the cores this process may use: RLCTL_CPU_CORES, else its affinity, limited to a container's quota. The
    hardware threads of a core share its arithmetic, and count once, as for torch."""
    if cores_set := os.environ.get("RLCTL_CPU_CORES"):
        if not cores_set.isdecimal() or int(cores_set) == 0:
            hint = "unset it to use every core"
            raise SpecError([Problem("RLCTL_CPU_CORES", "must be a positive whole number", hint, cores_set)])
        return int(cores_set)
    threads = os.sched_getaffinity(0)
    cores = len(threads)
    with suppress(OSError):
        cores = len({Path(_SIBLINGS.format(thread)).read_text() for thread in threads})
    with suppress(OSError, ValueError):  # without a quota it is the word max
        quota, period = map(int, _CGROUP_LIMIT.read_text().split())
        cores = max(1, min(cores, quota // period))
    return cores


@dataclass(frozen=True)
class _Planner:
    """Plans roles from what their plans have in common."""

    spec_dir: Path
    cores: int
    port: int
    address: str
    names: Sequence[str]
    at_once: int  # roles with CPU work at the same time, beside judging
    for_transport: Mapping[str, str]  # variables of the actor
    keys: Mapping[str, str]  # of the judges, which processes of this host inherit

    def role(self, name: RoleName, section: RoleSection) -> RolePlan:
        group_size = section.processes if ROLES[name].together else 1
        on_one_node = processes_of_a_node(section)
        # Phases alternate, so each model may use every core, unless sampling runs ahead; data is read before them. What
        # grades works meanwhile, and gets one core.
        share = 1 if ROLES[name].holds == "scorer" else max(1, self.cores // self.at_once // on_one_node)
        threads = section.threads or share
        # Not resolved: the link bin/python is what makes an interpreter that of its virtual environment.
        named = os.path.abspath(self.spec_dir / Path(section.python).expanduser())
        python = named if section.python else sys.executable
        meeting = self._meeting(name, section)
        hosts = self._hosts(section)
        own = _environment(section, name, threads, self._kept_on_loopback(name, section))
        env = {**self.for_transport, **own} if name == ACTOR else own
        commands = [_command(name, section, python, meeting, hosts, node) for node in range(len(hosts))]
        remote_env = {**env, "CUDA_VISIBLE_DEVICES": ",".join(map(str, section.devices))}
        remote_env |= self.keys if name == REWARD else {}
        return RolePlan(
            role=name,
            processes=section.processes,
            launcher=section.launcher,
            python=python,
            command=commands[0],
            env=env,
            devices=section.devices,
            threads=threads,
            world_size_of_group=group_size,
            nodes=section.nodes,
            nodes_of_rank=nodes_of_a_process(section),
            meeting=meeting,
            remote=tuple(
                RemoteNode(host, node, section.hosts[node], commands[node], remote_env)
                for node, host in enumerate(hosts)
                if section.hosts[node] > 0
            ),
        )

    def _kept_on_loopback(self, name: RoleName, section: RoleSection) -> tuple[str, ...]:
        """Return the variables that name the loopback interface: by default gloo listens where the host's name points,
        NCCL at the first interface. NCCL's holds for every group of a process, also with ranks on other hosts."""
        if not ROLES[name].holds_model or "lo" not in dict(socket.if_nameindex()).values():
            return ()
        if not self.address:
            return ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
        alone = section.nodes == 1 or not (ROLES[name].together or nodes_of_a_process(section) > 1)
        return ("GLOO_SOCKET_IFNAME",) if alone else ()

    def _meeting(self, name: RoleName, section: RoleSection) -> Rendezvous:
        if section.nodes == 1 or not ROLES[name].together:
            return Rendezvous()
        together = [role for role in ROLES if ROLES[role].together]
        return Rendezvous(self.address, self.port + together.index(name))

    def _hosts(self, section: RoleSection) -> list[str]:
        """Return a host per command that starts the role; srun starts all nodes with one."""
        if not section.leaves_host or section.launcher == "srun":
            return ["localhost"]
        return [self.names[number] if self.names else f"node {number}" for number in section.hosts]


def _command(
    role: RoleName, section: RoleSection, python: str, meeting: Rendezvous, hosts: list[str], node: int
) -> tuple[str, ...]:
    """Return the command that starts a role's processes on node `node`."""
    worker: tuple[str, ...] = ("-m", "workers.main", "--role", role)
    if ROLES[role].worker:
        worker += ("--module", ROLES[role].worker)
    processes = str(section.processes // section.nodes)
    match section.launcher:
        case "torchrun":
            place: tuple[str, ...] = ("--rdzv-endpoint", f"{meeting.address}:{meeting.port_text}")
            if section.nodes > 1:
                place += ("--nnodes", str(section.nodes), "--rdzv-conf", f"node={node}")
            return (python, "-m", "backends.torchrun", *place, "--nproc-per-node", processes, *worker)
        case "deepspeed":
            # The launcher of one node: DeepSpeed's `runner` would start other hosts itself, out of rlctl's sight, and
            # write their environment into command lines.
            place = ("--node_rank", str(node), "--world_info", _world_info(section, role, hosts))
            place += ("--master_addr", meeting.address, "--master_port", meeting.port_text)
            module = ("--module", "--no_local_rank", *worker[1:])
            return (python, "-m", "deepspeed.launcher.launch", *place, *module)
        case "srun":
            # Rank 0 belongs on this host (relative 0, block); the steps of actor and ref run side by side (overlap).
            place = ("--nodes", str(section.nodes), "--ntasks", str(section.processes), "--ntasks-per-node", processes)
            place += ("--relative", "0", "--distribution", "block", "--overlap", "--cpu-bind", "none")
            return ("srun", *place, "--kill-on-bad-exit=1", python, *worker)
    return (python, *worker)


def _world_info(section: RoleSection, role: RoleName, hosts: list[str]) -> str:
    """Return DeepSpeed's table host → GPU numbers for its launcher; on CPU the numbers only count processes."""
    elsewhere: list[str] = [str(number) for number in section.devices or range(section.processes // section.nodes)]
    here = [_visible(device, role) for device in section.devices] or elsewhere
    table = {host: elsewhere for host in hosts} | {hosts[0]: here}
    return base64.urlsafe_b64encode(json.dumps(table).encode()).decode()


def _environment(
    section: RoleSection, role: RoleName, threads: int, kept_on_loopback: tuple[str, ...]
) -> dict[str, str]:
    here = section.devices if 0 in section.hosts else ()
    env = {
        **dict.fromkeys(kept_on_loopback, "lo"),
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "PYTHONSAFEPATH": "1",
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": str(ROLES[role].holds == "data").lower(),
        "CUDA_VISIBLE_DEVICES": ",".join(_visible(device, role) for device in here),
    }
    if section.devices and "CUDA_DEVICE_ORDER" not in os.environ:
        env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # as nvidia-smi counts; CUDA's own order begins with the fastest
    if not section.devices:
        env["OMP_WAIT_POLICY"] = "PASSIVE"  # idle roles must not spin: 7-10x on a shared small machine
        env["GOMP_SPINCOUNT"] = SPIN_COUNT
    if section.launcher in ("deepspeed", "srun"):
        env["LOCAL_WORLD_SIZE"] = str(section.processes // section.nodes)  # torchrun sets it, these do not
    if section.launcher == "deepspeed" and not section.devices:
        env["DS_ACCELERATOR"] = "cpu"  # else it hands out GPUs where there are any
    if section.launcher == "srun":
        env["RLCTL_DEVICES"] = env["CUDA_VISIBLE_DEVICES"]  # SLURM overwrites the other with all of the job's
    env |= section.env
    env["PYTHONPATH"] = package_path(section.env.get("PYTHONPATH", os.environ.get("PYTHONPATH", "")))
    return env


def _without_expandable_segments() -> dict[str, str]:
    """Return allocator variables of this process without what keeps another process from mapping its memory."""
    changed = {}
    for name in ALLOCATOR_VARIABLES:
        options = [option.strip() for option in os.environ.get(name, "").split(",")]
        kept = [option for option in options if not option.startswith("expandable_segments")]
        if kept != options:
            changed[name] = ",".join(kept)
    return changed


def _visible(device: int, role: RoleName) -> str:
    """Return a GPU's number among those that this process sees: where a scheduler gave it 4 and 5, device 0 is 4."""
    outer = gpus_left()
    if not outer:
        return str(device)
    if not 0 <= device < len(outer):
        hint = f"CUDA_VISIBLE_DEVICES={','.join(outer)} leaves numbers 0 to {len(outer) - 1}"
        raise SpecError([Problem(f"{role}.devices", "no such GPU here", hint, str(device))])
    return outer[device]
