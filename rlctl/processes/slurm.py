"""The hosts of a SLURM job, and shells on them as steps of the job."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from rlctl.processes.shells import LocalShell
from specs.errors import Problem, SpecError
from specs.schema.spec import Spec
from workers.network import address_towards

_COUNTS = ("SLURM_JOB_NUM_NODES_HET_GROUP_0", "SLURM_JOB_NUM_NODES", "SLURM_NNODES")  # srun's is the first part


class SlurmJob:
    """The job that this process is in: `Cluster`. The hosts of a second part come after those of the first."""

    replaces = gives_devices = False

    def __init__(self, env: Mapping[str, str]) -> None:
        self._env = env
        self.address, self.names, self._parts = "", list[str](), list[int]()
        self.pending: dict[str, str] = {}

    def count(self, gpus: int) -> int:
        return sum(_counts(self._env))

    def reserve(self, say: Callable[[str], None]) -> None:
        """Raise SpecError where SLURM does not say which hosts there are."""
        env = self._env
        lists = [env[name] for number in (0, 1) if (name := f"SLURM_JOB_NODELIST_HET_GROUP_{number}") in env]
        parts = [_hostnames(listed) for listed in lists or [env.get("SLURM_JOB_NODELIST", "")]]
        self._parts = [number for number, names in enumerate(parts) for _ in names] if lists else []
        self.names = [name for names in parts for name in names]
        self.address = _own_address(self.names[1:])

    def shell(self, number: int, devices: Sequence[int], env: Mapping[str, str], log_path: Path) -> LocalShell:
        return LocalShell(self.step(number), env, log_path)

    def step(self, number: int) -> tuple[str, ...]:
        """Return the command of a step that is a shell on a host."""
        part = (f"--het-group={self._parts[number]}",) if self._parts else ()
        place = ("--overlap", "--nodes=1", "--ntasks=1", "--cpu-bind=none", f"--nodelist={self.names[number]}")
        return ("srun", *part, *place, "sh")

    def close(self) -> None:
        pass


def check_slurm(spec: Spec, env: Mapping[str, str]) -> None:
    """Raise SpecError where srun cannot work: it needs a SLURM job with as many hosts as the spec asks for."""
    roles = [name for name in spec.roles if spec.role(name).launcher == "srun"]
    by_kind = spec.cluster is not None and spec.cluster.kind == "slurm"
    if not roles and not by_kind:
        return
    if not env.get("SLURM_JOB_ID"):
        hint = "run it from a batch script (rlctl init --launcher slurm writes one), or use another launcher"
        key, value = (f"{roles[0]}.launcher", '"srun"') if roles else ("cluster.kind", '"slurm"')
        raise SpecError([Problem(key, "this is not a SLURM job", hint, value)])
    has, apart = _counts(env)
    short = [name for name in roles if spec.role(name).nodes > has]
    if by_kind:
        short += [name for name in spec.roles if spec.role(name).hosts.stop > has + apart]
    if short:
        hint = f"ask for more with #SBATCH --nodes, or for fewer with {short[0]}.nodes"
        nodes = str(spec.role(short[0]).nodes)
        listed = env.get("SLURM_JOB_NODELIST_HET_GROUP_0", env.get("SLURM_JOB_NODELIST", ""))
        named = f": {listed}" if listed else ""
        raise SpecError([Problem(f"{short[0]}.nodes", f"the SLURM job has {has}{named}", hint, nodes)])


def _counts(env: Mapping[str, str]) -> tuple[int, int]:
    """Return how many nodes the job's first part has, and its second."""
    first = next((env[name] for name in _COUNTS if name in env), "1")
    return int(first), int(env.get("SLURM_JOB_NUM_NODES_HET_GROUP_1", "0"))


def _hostnames(listed: str) -> list[str]:
    try:
        done = subprocess.run(["scontrol", "show", "hostnames", listed], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        why = f"scontrol show hostnames {listed}: {getattr(error, 'stderr', '') or error}".strip()
        raise SpecError([Problem("cluster.kind", why, "run it inside a SLURM job", '"slurm"')]) from None
    return done.stdout.split()


def _own_address(others: Sequence[str]) -> str:
    """Return this host's IPv4 address on the way to the others. Raise SpecError where there is none."""
    for name in others:
        with suppress(OSError):
            return address_towards(name)
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError as error:
        message = f"cannot resolve or route to {', '.join(others) or socket.gethostname()}: {error}"
        raise SpecError([Problem("cluster.kind", message, "the hosts of a job must find each other by name")]) from None
