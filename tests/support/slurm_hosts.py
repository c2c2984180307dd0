"""A real SLURM cluster on one machine: a node in each of the network namespaces of `some_hosts`."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from running import REPO, environment, wait_for
from some_hosts import SLURM_CONTROLLER, Hosts, kill, pids_in, some_hosts

_CONFIG = """
ClusterName=small
AuthType=auth/munge
SlurmUser=root
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SchedulerParameters=sched_interval=1,bf_interval=1,bf_min_age_reserve=0
SlurmdParameters=config_overrides
SlurmdTimeout=5
ReturnToService=2
MpiDefault=none
"""


@dataclass(frozen=True)
class SlurmCluster:
    """`hosts`: its nodes; the first has the controller. `folder`: its files."""

    hosts: Hosts
    folder: Path
    daemons: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def ask(self, *words: str, cwd: Path | None = None) -> str:
        """Return what one of SLURM's commands prints on the first host."""
        env = environment(PYTHONPATH=str(REPO), OMP_NUM_THREADS="1", SLURM_CONF=str(self.folder / "slurm.conf"))
        done = subprocess.run(
            self.hosts.command(*words), cwd=cwd, env=env, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def submit(self, script: Path, *options: str) -> str:
        """Return the number of the job."""
        return self.ask("sbatch", "--parsable", script.name, *options, cwd=script.parent)

    def state(self, job: str) -> str:
        return self.ask("squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T").partition("\n")[0]

    def start_now(self, job: str) -> None:
        """Have a job that waits begin. Ask again until it has: a requeue that goes on sets a later time of its own."""
        if self.state(job) == "PENDING":
            with suppress(AssertionError):  # it has just begun
                self.ask("scontrol", "update", f"jobid={job}", "starttime=now")

    def ended(self, job: str) -> bool:
        return self.state(job) not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")

    def nodes(self, job: str) -> set[str]:
        """Return the hosts of a job that runs, of all of its parts."""
        listed = self.ask("squeue", "--noheader", f"--jobs={job}", "--format=%N").split()
        return {host for part in listed for host in self.ask("scontrol", "show", "hostnames", part).split()}

    def join(self, host: str) -> None:
        """Start a host's part of the cluster. It has a name of its own, and no control groups."""
        own = f"hostname {host}; mount -t tmpfs none /sys/fs/cgroup; exec slurmd -D -N {host}"
        self._start(host, "unshare", "--uts", "sh", "-c", own)

    def kill(self, host: str, name: str) -> None:
        """Kill the processes of this name on a host."""
        found = [pid for pid in pids_in(host) if _name(pid) == name]
        assert found, f"no {name} on {host}"
        kill(found)

    def leave(self, host: str) -> None:
        """Kill all that runs on a host but the controller."""
        kill(pid for pid in pids_in(host) if _name(pid) not in SLURM_CONTROLLER)

    def begin(self) -> None:
        """Start all of it and wait until every node may be used."""
        (self.folder / "state").mkdir()
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        (self.folder / "munge.key").write_bytes(os.urandom(128))
        (self.folder / "munge.key").chmod(0o600)
        addresses = {name: f"10.77.0.{number}" for number, name in enumerate(self.hosts.names, start=1)}
        for name in addresses:
            (self.folder / f"spool-{name}").mkdir()
            Path(f"/etc/netns/{name}").mkdir(parents=True)
            known = [f"{address} {host}\n" for host, address in addresses.items()]
            Path(f"/etc/netns/{name}/hosts").write_text("127.0.0.1 localhost\n" + "".join(known))
        places = {
            "SlurmctldHost": f"{self.hosts.here}({self.hosts.address})",
            "AuthInfo": f"socket={self.folder}/munge.socket",
            "StateSaveLocation": f"{self.folder}/state",
            "SlurmdSpoolDir": f"{self.folder}/spool-%n",
            "SlurmctldPidFile": f"{self.folder}/slurmctld.pid",
            "SlurmdPidFile": f"{self.folder}/slurmd-%n.pid",
        }
        lines = [f"{key}={value}\n" for key, value in places.items()]
        lines += [f"NodeName={name} NodeAddr={address} CPUs=4\n" for name, address in addresses.items()]
        lines += [f"PartitionName=all Nodes={','.join(addresses)} Default=YES\n"]
        (self.folder / "slurm.conf").write_text(_CONFIG + "".join(lines))
        files = {"socket": "munge.socket", "key-file": "munge.key", "log-file": "munge.log", "pid-file": "munge.pid"}
        files["seed-file"] = "munge.seed"
        own = [f"--{option}={self.folder / file}" for option, file in files.items()]
        self._start(self.hosts.here, "munged", "--force", "--foreground", *own)
        wait_for((self.folder / "munge.socket").exists, 20, "munged")
        self._start(self.hosts.here, "unshare", "--uts", "sh", "-c", f"hostname {self.hosts.here}; exec slurmctld -D")
        for name in self.hosts.names:
            self.join(name)
        wait_for(self.ready, 60, "SLURM's nodes")

    def ready(self) -> bool:
        """Return whether every node may be used and none is."""
        try:
            return self.ask("sinfo", "--noheader", "--format=%T %D") == f"idle {len(self.hosts.names)}"
        except AssertionError:  # the controller does not answer yet
            return False

    def _start(self, host: str, *words: str) -> None:
        with (self.folder / "daemons.log").open("ab") as log:
            command = ["ip", "netns", "exec", host, *words]
            env = {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")}
            self.daemons.append(subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True))


def _name(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


@contextmanager
def slurm_hosts(folder: Path) -> Iterator[SlurmCluster]:
    """Three joined hosts, each a node. Skipped where SLURM is not installed, or without network namespaces."""
    if not all(map(shutil.which, ("slurmctld", "slurmd", "munged", "srun"))):
        pytest.skip("SLURM is not installed (Debian: slurm-wlm, munge)")
    with some_hosts() as hosts:
        cluster = SlurmCluster(hosts, folder)
        try:
            cluster.begin()
            yield cluster
        finally:
            for name in hosts.names:
                kill(pids_in(name))
                shutil.rmtree(f"/etc/netns/{name}", ignore_errors=True)
            for daemon in cluster.daemons:
                daemon.wait(20)
