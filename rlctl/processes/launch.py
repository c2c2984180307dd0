"""Starting and ending the processes of a run. Whatever happens, nothing is left running."""

from __future__ import annotations

import logging
import os
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlctl.processes.node_connection import NodeConnection, RemoteProcess
from rlctl.processes.placement import FREE_PORT, LAUNCHER_VARIABLES, LOOPBACK, RemoteNode, RolePlan
from rlctl.processes.shells import Cluster, LocalShell, Shell
from specs.errors import Problem, SpecError
from specs.packages import path_for
from workers.watchdog import kill_marked, signal_group

log = logging.getLogger("rlctl.processes.launch")

Place = tuple[str, int]  # role, rank

_OUR_VARIABLES = (
    *("RLCTL_LOG_DIR", "RLCTL_DUMP_DIR", "RLCTL_RANK", "RLCTL_SIZE", "RLCTL_GROUP_SIZE", "RLCTL_GROUP_STORE"),
    *("RLCTL_CURVE_KEY", "RLCTL_DEVICES", "RLCTL_LOCAL_SIZE", "RLCTL_START", "RLCTL_SPAN"),
    *("RLCTL_SPAN_NODES", "RLCTL_SPAN_NODE"),
)
# What the person set for all processes reaches other hosts too; the rest of an environment belongs to its host.
SHARED_PREFIXES = ("HF_", "NCCL_", "GLOO_", "TORCH_", "CUDA_DEVICE_", "DS_")
_OWN_MARK = "RLCTL_PROCESS"
_KILL_TIMEOUT_S = 10.0
_REMOTE_GRACE_S = 10.0
_REMOTE_KILL_S = 8.0  # for a host to report that a process of it was killed


@dataclass(frozen=True)
class Started:
    """A process that the driver started, here or on another `host`: one rank (`launcher` "python"), a launcher of
    several, or a part of a rank that spans nodes, which does not end by itself."""

    role: str
    ranks: tuple[int, ...]
    process: subprocess.Popen[bytes] | RemoteProcess
    log_path: Path
    launcher: str = "python"
    host: str = ""
    mark: str = ""  # in its environment and that of its children on its host
    is_part: bool = False


class Launcher:
    """Processes of one run. `home` is what a rank needs to dial home (`Hub.environment`).

    `start` must be called from the main thread: the kernel ends a rank when the *thread* that started it ends.
    """

    def __init__(self, log_dir: Path, home: Mapping[str, str], cluster: Cluster | None = None) -> None:
        """`cluster`: the other hosts, which are given back at the end."""
        self.log_dir, self.cluster = log_dir, cluster
        self.started: list[Started] = []
        self.run_id = secrets.token_hex(16)
        self._home = dict(home)
        self._spawned = 0
        self._stores: list[Path] = []  # folders with the file in which ranks on this host meet (torch's `FileStore`)
        self._ports: list[socket.socket] = []
        self._nodes: dict[tuple[str, str], NodeConnection] = {}  # by role and host

    def start(self, plan: RolePlan) -> None:
        """Start a role's processes; return at once. Logs go to `log_dir/<role>/rank<N>.log`."""
        folder = self.log_dir.absolute() / plan.role
        folder.mkdir(parents=True, exist_ok=True)
        group: dict[str, str] = {}
        port = str(plan.meeting.port or self._reserve_port()) if plan.world_size_of_group > 1 else ""
        if plan.world_size_of_group > 1 and plan.nodes == 1:
            # Not in the run directory: on a network file system locks are slow or missing. Only this user enters it.
            self._stores.append(Path(tempfile.mkdtemp(prefix="rlctl-")))
            group["RLCTL_GROUP_STORE"] = str(self._stores[-1] / plan.role)
        if plan.launcher == "python":
            for rank in range(plan.processes):
                self.start_rank(plan, rank, group, port)
            return
        to_log = {"RLCTL_LOG_DIR": str(folder)}
        meeting_port = port or str(self._reserve_port())
        command = tuple(word.replace(FREE_PORT, meeting_port) for word in plan.command)
        log_path = folder / "launcher.log"
        if plan.launcher == "srun":
            # It does not end by itself when the driver dies: a supervisor on this host ends it.
            meeting = {"MASTER_ADDR": plan.meeting.address, "MASTER_PORT": port}
            node = RemoteNode("", 0, 0, command, plan.env | meeting)
            self._start_remote(plan, node, tuple(range(plan.processes)), to_log, log_path)
            return
        self._spawn(plan, plan.ranks_of(0), command, group | to_log, log_path)
        for node in plan.remote:
            log_path = folder / f"launcher_{node.host}.log"
            self._start_remote(plan, node, plan.ranks_of(node.node_rank), to_log, log_path)

    def start_rank(self, plan: RolePlan, rank: int, more: Mapping[str, str], port: str = "") -> None:
        """Start a rank that has a process of its own, and its parts on other nodes. One on another host ends where that
        host is not there, or cannot do its part. `more`: variables; `port`: the meeting port of ranks that compute
        together."""
        log_path = self.log_dir.absolute() / plan.role / f"rank{rank}.log"
        place = {**more, **_place(plan, rank, port)}
        if plan.nodes_of_rank > 1:
            meeting = tempfile.mkdtemp(prefix=f"rank{rank}_", dir=log_path.parent)
            place |= {"RLCTL_SPAN": meeting, "RLCTL_SPAN_NODES": str(plan.nodes_of_rank)}
        if (node := plan.remote_of(rank)) is not None:
            self._start_remote(plan, node, (rank,), place, log_path)
        else:
            self._spawn(plan, (rank,), plan.command, place, log_path)
        for node in plan.remotes_of(rank):
            if part := plan.part_of(node):
                log_path = log_path.with_name(f"rank{rank}_node{part}.log")
                self._start_remote(plan, node, (rank,), place | {"RLCTL_SPAN_NODE": str(part)}, log_path)

    def _reserve_port(self) -> int:
        """Bind a port, so that the kernel gives it to no other process until `stop`. A store that sets SO_REUSEADDR, as
        torch's do, may listen there."""
        held = socket.socket()
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((LOOPBACK, 0))
        self._ports.append(held)
        return int(held.getsockname()[1])

    def start_again(self, plan: RolePlan, rank: int, start: int) -> None:
        """Start one replica again, after `kill`. Its log continues below a line that says so. `start`: which time this
        is."""
        assert plan.launcher == "python", f"{plan.launcher} starts {plan.role} as a whole"
        assert plan.world_size_of_group == 1, f"ranks of {plan.role} need one another"
        with self.log_path(plan.role, rank).open("a", encoding="utf-8") as log_file:
            log_file.write(f"\n── {plan.role} rank {rank} is started again ──\n")
        self.start_rank(plan, rank, {"RLCTL_START": str(start)})

    def kill(self, role: str, rank: int, *, wait: bool = True) -> None:
        """SIGKILL what is left of a rank that has a process of its own, with all that it started, and forget it.
        `wait`: for its host, where that is another one, to report that it has ended."""
        for started in [one for one in self.started if one.role == role and one.ranks == (rank,)]:
            self.started.remove(started)
            if isinstance(started.process, RemoteProcess):
                # A host that does not answer has lost its connection, and all its ranks of the role with it.
                # A supervisor that still lives there ends its processes with the shell.
                if not started.process.kill(_REMOTE_KILL_S if wait else 0.0):
                    started.process.node.shell.kill()
                continue
            left = _kill_all(started.mark, started.process.pid)
            try:
                started.process.wait(_KILL_TIMEOUT_S)  # it loses its environment, and with it the mark, before it ends
            except subprocess.TimeoutExpired:
                left.append(started.process.pid)
            if left:
                log.error("processes of %s rank %d that could not be ended: %s", role, rank, left)

    def _start_remote(
        self, plan: RolePlan, node: RemoteNode, ranks: tuple[int, ...], env: Mapping[str, str], log_path: Path
    ) -> None:
        """Start a process through the supervisor of its role and host."""
        connection = self._nodes.get((plan.role, node.host))
        if connection is None or connection.shell.poll() is not None:
            is_new = connection is not None or (self.cluster is not None and node.host in self.cluster.pending)
            if connection is not None:
                connection.close()
            connection = self._nodes[plan.role, node.host] = self._connect(plan, node, is_new=is_new)
        process = RemoteProcess(connection, self._new_mark())
        process.start(node.command, env, log_path)
        is_part = plan.part_of(node) > 0
        started = Started(plan.role, ranks, process, log_path, plan.launcher, node.host, process.key, is_part)
        self.started.append(started)

    def _connect(self, plan: RolePlan, node: RemoteNode, *, is_new: bool) -> NodeConnection:
        """Open a shell on a host, which reads what to run, secrets too, from its input. `is_new`: the host was not
        there when the others were checked."""
        log_path = self.log_dir.absolute() / plan.role / f"supervisor_{node.host or 'here'}.log"
        env = base_environment() | {_OWN_MARK: self._new_mark()}
        given = dict(node.env)
        shell: Shell
        if node.number == 0:
            shell = LocalShell(("sh",), env, log_path)
        else:
            assert self.cluster is not None, f"{plan.role} is on {node.host}"
            shell = self.cluster.shell(node.number, plan.devices, env, log_path)
            if self.cluster.gives_devices:
                given.pop("CUDA_VISIBLE_DEVICES", None)
        shared = {name: value for name, value in os.environ.items() if name.startswith(SHARED_PREFIXES)}
        supervisor = (plan.python, "-m", "workers.node")
        script = remote_script({**shared, **given, **self._ours(plan)}, supervisor, first=node.check if is_new else ())
        return NodeConnection(node.host, shell, script, log_path)

    def log_path(self, role: str, rank: int) -> Path:
        return self.log_dir / role / f"rank{rank}.log"

    def stop(self, grace_s: float = 5.0) -> None:
        """End everything: SIGTERM to each process group, `grace_s` to obey, SIGKILL, then a search for stragglers."""
        here = {one.mark: one.process.pid for one in self.started if isinstance(one.process, subprocess.Popen)}
        shells = [node.shell for node in self._nodes.values()]
        for shell in shells:
            shell.hang_up()  # with its input a supervisor ends all that it started
        for leader in here.values():
            signal_group(leader, signal.SIGTERM)
            signal_group(leader, signal.SIGCONT)  # a stopped process obeys only once it runs again
        _wait_for_all([*self._processes, *shells], grace_s)
        for mark, leader in here.items():
            _kill_all(mark, leader)
        # A remote shell that is killed early cannot report that its host is clean.
        _wait_for_all([*self._processes, *shells], _REMOTE_GRACE_S)
        for shell in shells:
            if shell.poll() is None:
                shell.kill()
        _wait_for_all([*self._processes, *shells], _KILL_TIMEOUT_S)
        left = kill_marked(f"RLCTL_RUN_ID={self.run_id}", _KILL_TIMEOUT_S)
        if left:
            log.error("processes that could not be ended: %s", left)
        for connection in self._nodes.values():
            connection.close()
        if self.cluster is not None:
            self.cluster.close()
        for folder in self._stores:
            shutil.rmtree(folder, ignore_errors=True)
        for held in self._ports:
            held.close()

    def wait(self, timeout_s: float) -> bool:
        """Wait for every started process to end that does so by itself; return False when some did not in time."""
        return _wait_for_all([started.process for started in self.started if not started.is_part], timeout_s)

    @property
    def _processes(self) -> list[subprocess.Popen[bytes] | RemoteProcess]:
        return [started.process for started in self.started]

    def _ours(self, plan: RolePlan) -> dict[str, str]:
        """Return what makes a process a rank of this run, on any host."""
        place = {"RLCTL_RUN_ID": self.run_id, "RLCTL_GROUP_SIZE": str(plan.world_size_of_group)}
        dumps = {"RLCTL_DUMP_DIR": str(self.log_dir.absolute() / plan.role)}
        return self._home | place | dumps | {"PYTHONPATH": path_for(plan.python, plan.env["PYTHONPATH"], self.log_dir)}

    def _spawn(
        self, plan: RolePlan, ranks: tuple[int, ...], command: tuple[str, ...], env: Mapping[str, str], log_path: Path
    ) -> None:
        """Start a process here, with its output in a log. Raise SpecError."""
        mark = self._new_mark()
        ours = self._ours(plan) | {"RLCTL_PARENT_PID": str(os.getpid()), _OWN_MARK: mark}
        with log_path.open("ab") as output:
            try:
                process = subprocess.Popen(
                    command,
                    env={**base_environment(), **plan.env, **ours, **env},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,  # Ctrl-C reaches the driver only, and the whole group can be signalled
                )
            except OSError as error:
                why, hint = f"cannot be started: {error.strerror}", "name a program that exists, or leave the key out"
                raise SpecError([Problem(f"{plan.role}.python", why, hint, command[0])]) from None
        self.started.append(Started(plan.role, ranks, process, log_path, plan.launcher, mark=mark))

    def _new_mark(self) -> str:
        self._spawned += 1
        return f"{self.run_id}.{self._spawned}"


def base_environment() -> dict[str, str]:
    """Return this process's environment, without what a launcher above it set for it."""
    return {name: value for name, value in os.environ.items() if name not in (*LAUNCHER_VARIABLES, *_OUR_VARIABLES)}


def remote_script(env: Mapping[str, str], command: Sequence[str], *, first: Sequence[str] = ()) -> str:
    """Return what a POSIX shell on another host reads to become `command`, in the driver's folder, unless `first` has
    another exit code than 0."""
    exports = [f"export {name}={shlex.quote(value)}" for name, value in sorted(env.items())]
    check = [f"{shlex.join(first)} </dev/null || exit 1"] if first else []
    become = f"exec {shlex.join(command)}"
    return "\n".join([f"cd {shlex.quote(os.getcwd())} || exit 1", *exports, *check, become, ""])


def _wait_for_all(processes: Sequence[subprocess.Popen[bytes] | RemoteProcess | Shell], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while any(process.poll() is None for process in processes):
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.01)
    return True


def _kill_all(mark: str, leader: int) -> list[int]:
    """SIGKILL a process here and all that it started; return what would not end."""
    left = kill_marked(f"{_OWN_MARK}={mark}", _KILL_TIMEOUT_S)
    signal_group(leader, signal.SIGKILL)  # where no mark can be read
    return left


def describe_exit(code: int) -> str:
    if code >= 0:
        return f"its process ended with exit code {code}"
    try:
        return f"its process was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"its process was ended by signal {-code}"


def tail(path: Path, lines: int = 20) -> str:
    """Return the last lines of a log; empty when there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 65536))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-lines:])


def _place(plan: RolePlan, rank: int, port: str) -> dict[str, str]:
    local = rank % plan.on_each
    place = {"RLCTL_RANK": str(rank), "RLCTL_SIZE": str(plan.processes), "RLCTL_LOCAL_SIZE": str(plan.on_each)}
    place["LOCAL_RANK"] = str(local)
    if not port:
        return place
    group = {"RANK": str(rank), "WORLD_SIZE": str(plan.processes), "LOCAL_WORLD_SIZE": str(plan.processes)}
    return place | group | {"MASTER_ADDR": plan.meeting.address, "MASTER_PORT": port}
