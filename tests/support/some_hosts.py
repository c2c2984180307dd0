"""Several hosts on one machine: network namespaces joined by cables to a switch, each with its own loopback; and a Ray
cluster with a node on each."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

_PORT = 6399
_RAY_PROCESSES = ("gcs_server", "raylet", "ray::", "log_monitor", "runtime_env", "dashboard", "monitor.py")
SLURM_CONTROLLER = ("slurmctld", "slurmscriptd", "munged")


@dataclass(frozen=True)
class Hosts:
    """Names of the namespaces, which stand for host names, and the first one's address on its cable."""

    here: str
    there: str
    third: str
    address: str

    def command(self, *words: str) -> list[str]:
        """`words` as a command that runs on the first host."""
        return ["ip", "netns", "exec", self.here, *words]

    @property
    def names(self) -> tuple[str, str, str]:
        return self.here, self.there, self.third

    @property
    def ray_address(self) -> str:
        return f"{self.address}:{_PORT}"

    @property
    def idle(self) -> bool:
        """No process but the cluster's own is left on any of them."""
        return not any(left_in(name) for name in self.names)

    def join(self, host: str, gpus: int = 0) -> None:
        """Make a host a node of the cluster; the first one becomes its head."""
        number = self.names.index(host) + 1
        head = ["--head", f"--port={_PORT}", "--include-dashboard=false", "--no-monitor"]
        role = head if number == 1 else [f"--address={self.ray_address}"]
        options = [f"--node-ip-address=10.77.0.{number}", "--num-cpus=4", f"--num-gpus={gpus}"]
        ray = str(Path(sys.executable).with_name("ray"))
        command = [ray, "start", *role, *options, "--disable-usage-stats", "--include-log-monitor=false"]
        subprocess.run(["ip", "netns", "exec", host, *command], check=True, capture_output=True)

    def leave(self, host: str) -> None:
        """Kill a host's part of the cluster."""
        kill(pid for pid in pids_in(host) if any(name in _command_line(pid) for name in _RAY_PROCESSES))

    def plug(self, host: str, state: str) -> None:
        """`state` is "up" or "down", of the host's cable."""
        subprocess.run(["ip", "-n", host, "link", "set", "cable", state], check=True)


def left_in(host: str) -> list[str]:
    """Return the processes in a namespace that are not the cluster's own."""
    own = (*_RAY_PROCESSES, *SLURM_CONTROLLER, "slurmd")
    return [pid for pid in pids_in(host) if not any(name in _command_line(pid) for name in own)]


def pids_in(host: str) -> list[str]:
    done = subprocess.run(["ip", "netns", "pids", host], capture_output=True, text=True, check=True)
    return done.stdout.split()


def kill(pids: Iterable[str]) -> None:
    """Kill processes; one that has ended meanwhile is no error."""
    for pid in pids:
        subprocess.run(["kill", "-9", pid], capture_output=True, check=False)


def _command_line(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


@contextmanager
def some_hosts() -> Iterator[Hosts]:
    """Three joined hosts. The test is skipped where this process may not make network namespaces."""
    mark = f"rl{os.getpid()}"
    names, switch = [f"{mark}{letter}" for letter in "abc"], f"{mark}s"
    try:
        if not _build(names, switch):
            pytest.skip("this process may not make network namespaces")
        yield Hosts(*names, "10.77.0.1")
    finally:
        for name in (*names, switch):
            _run("ip", "netns", "delete", name)


@contextmanager
def ray_hosts() -> Iterator[Hosts]:
    """The same, each a node of a Ray cluster. Skipped where Ray is not installed, too."""
    pytest.importorskip("ray")
    with some_hosts() as hosts:
        try:
            for name in hosts.names:
                hosts.join(name)
            yield hosts
        finally:
            for name in hosts.names:
                kill(pids_in(name))


def _build(names: list[str], switch: str) -> bool:
    """The namespaces and the cables; False as soon as one command is refused."""
    if shutil.which("ip") is None:
        return False
    on_switch = ("-n", switch, "link")
    steps: list[tuple[str, ...]] = [("netns", "add", switch), (*on_switch, "add", "name", "switch", "type", "bridge")]
    steps += [(*on_switch, "set", "switch", "up")]
    for number, host in enumerate(names, start=1):
        port = f"port{number}"
        steps += [("netns", "add", host)]
        steps += [("link", "add", "cable", "netns", host, "type", "veth", "peer", "name", port, "netns", switch)]
        steps += [(*on_switch, "set", port, "master", "switch"), (*on_switch, "set", port, "up")]
        steps += [("-n", host, "addr", "add", f"10.77.0.{number}/24", "dev", "cable")]
        steps += [("-n", host, "link", "set", device, "up") for device in ("cable", "lo")]
    return all(_run("ip", *step) for step in steps)


def _run(*command: str) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0 if shutil.which("ip") else False
