"""Where a run's processes go: per role its command, environment, devices, threads. Starts and changes nothing."""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

from specs.errors import Problem, SpecError
from specs.schema import RoleName, RoleSection, Spec

LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Between two small operations a thread waits for the next by spinning this often, some tens of microseconds, before it
# sleeps: without it decoding takes 1.5x and training 1.2x as long; idle roles still sleep.
SPIN_COUNT = "20000"
_ONE_GROUP = ("actor", "ref")  # their processes compute together; those of other roles are independent replicas
_CGROUP_LIMIT = Path("/sys/fs/cgroup/cpu.max")


@dataclass(frozen=True)
class RolePlan:
    """One role. `command` starts one process (`python`) or all of them (`torchrun`); `env` is what rlctl adds."""

    role: RoleName
    processes: int
    launcher: str
    python: str
    command: tuple[str, ...]
    env: dict[str, str]
    devices: tuple[int, ...]
    threads: int
    world_size_of_group: int


@dataclass(frozen=True)
class Plan:
    """All roles in the order in which they start. `colocated`: trainers and rollouts take turns on their devices."""

    roles: tuple[RolePlan, ...]
    colocated: bool

    def role(self, name: str) -> RolePlan:
        return next(plan for plan in self.roles if plan.role == name)


def make_plan(spec: Spec, spec_dir: Path, *, cores: int | None = None) -> Plan:
    """Plan a run of `spec`, whose relative paths start at `spec_dir`, on a machine with `cores` CPU cores
    (unset: those this process may use)."""
    usable = cores or usable_cores()
    roles = tuple(_plan_role(name, spec.role(name), spec_dir, usable) for name in spec.roles)
    return Plan(roles, _colocated(spec))


def usable_cores() -> int:
    """Cores this process may use: RLCTL_CPU_CORES, else its affinity, cut to a container's quota."""
    if asked := os.environ.get("RLCTL_CPU_CORES"):
        if not asked.isdecimal() or int(asked) == 0:
            raise SpecError([Problem("RLCTL_CPU_CORES", "must be a positive whole number", value=asked)])
        return int(asked)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = _CGROUP_LIMIT.read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


def package_root() -> Path:
    """The folder that holds rlctl, specs, workers and backends."""
    return Path(__file__).resolve().parent.parent


def _plan_role(name: RoleName, section: RoleSection, spec_dir: Path, cores: int) -> RolePlan:
    python = _interpreter(section.python, spec_dir)
    group_size = section.processes if name in _ONE_GROUP else 1
    # Phases alternate, so actor and rollout may each use every core; judging overlaps with both and gets one.
    threads = section.threads or (1 if name == "reward" else max(1, cores // section.processes))
    return RolePlan(
        role=name,
        processes=section.processes,
        launcher=section.launcher,
        python=python,
        command=_command(name, section, python),
        env=_environment(section, name, threads, group_size),
        devices=section.devices,
        threads=threads,
        world_size_of_group=group_size,
    )


def _interpreter(asked: str, spec_dir: Path) -> str:
    if not asked:
        return sys.executable
    # Not resolved: the link bin/python is what makes an interpreter that of its virtual environment.
    return os.path.abspath(spec_dir / Path(asked).expanduser())


def _command(role: RoleName, section: RoleSection, python: str) -> tuple[str, ...]:
    worker = ("-m", "workers.main", "--role", role)
    if section.launcher == "torchrun":
        nproc = ("--nproc-per-node", str(section.processes))
        return (python, "-m", "torch.distributed.run", "--standalone", *nproc, *worker)
    return (python, *worker)


def _environment(section: RoleSection, role: RoleName, threads: int, group_size: int) -> dict[str, str]:
    env = {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "PYTHONSAFEPATH": "1",
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "CUDA_VISIBLE_DEVICES": ",".join(_visible(device, role) for device in section.devices),
    }
    if not section.devices:
        env["OMP_WAIT_POLICY"] = "PASSIVE"  # idle roles must not spin: 7-10x on a shared small machine
        env["GOMP_SPINCOUNT"] = SPIN_COUNT
    if group_size > 1 and _has_loopback_interface():
        env["GLOO_SOCKET_IFNAME"] = "lo"  # by default gloo listens where the host's name points
    env |= section.env
    paths = (str(package_root()), section.env.get("PYTHONPATH", os.environ.get("PYTHONPATH", "")))
    env["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    return env


def _visible(device: int, role: RoleName) -> str:
    """GPU numbers count what this process sees: where a scheduler handed out GPUs 4 and 5, device 0 is GPU 4."""
    outer = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    if not outer:
        return str(device)
    if not 0 <= device < len(outer):
        hint = f"CUDA_VISIBLE_DEVICES={','.join(outer)} leaves numbers 0 to {len(outer) - 1}"
        raise SpecError([Problem(f"{role}.devices", "no such GPU here", hint, str(device))])
    return outer[device]


def _has_loopback_interface() -> bool:
    return any(name == "lo" for _, name in socket.if_nameindex())


def _colocated(spec: Spec) -> bool:
    if spec.run.colocate == "auto":
        return bool(set(spec.actor.devices) & set(spec.rollout.devices))
    return spec.run.colocate == "always"
