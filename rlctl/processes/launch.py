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
import sys
import tempfile
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from rlctl.processes.placement import FREE_PORT, LAUNCHER_VARIABLES, LOOPBACK, RemoteNode, RolePlan, package_root
from rlctl.processes.remote_ranks import NodeConnection, RemoteRank
from specs.errors import Problem, SpecError
from workers.watchdog import kill_marked, pids_marked, signal_group

log = logging.getLogger("rlctl.processes.launch")

Place = tuple[str, int]  # role, rank

_OUR_VARIABLES = (
    *("RLCTL_LOG_DIR", "RLCTL_DUMP_DIR", "RLCTL_RANK", "RLCTL_SIZE", "RLCTL_GROUP_SIZE", "RLCTL_GROUP_STORE"),
    *("RLCTL_CURVE_KEY", "RLCTL_DEVICES", "RLCTL_LOCAL_SIZE"),
)
# What the person set for all processes reaches other hosts too; the rest of an environment belongs to its host.
SHARED_PREFIXES = ("HF_", "NCCL_", "GLOO_", "TORCH_", "CUDA_DEVICE_", "DS_")
_OWN_MARK = "RLCTL_PROCESS"
_PACKAGES = ("rlctl", "specs", "workers", "backends")
_KILL_TIMEOUT_S = 10.0
_REMOTE_GRACE_S = 10.0
_REMOTE_KILL_S = 8.0  # for a host to report that a rank of it was killed
CONNECTION_SILENCE_S = 120.0  # a connection that is silent for long is closed on its way: by a kubelet, a firewall


@dataclass(frozen=True)
class Started:
    """A process the driver started: one rank, or a launcher of several, perhaps on another `host`. A rank that has a
    process of its own there is a `RemoteRank`.

    `ends_with_stdin`: closing its standard input ends it, and all that it started.
    """

    role: str
    ranks: tuple[int, ...]
    process: subprocess.Popen[bytes] | RemoteRank
    log_path: Path
    launcher: str = ""  # torchrun, deepspeed, srun
    host: str = ""
    ends_with_stdin: bool = False
    mark: str = ""  # in its environment and that of its children on this host

    @property
    def is_launcher(self) -> bool:
        return bool(self.launcher)


class Launcher:
    """Processes of one run. `home` is what a rank needs to dial home (`Hub.environment`).

    `start` must be called from the main thread: the kernel ends a rank when the *thread* that started it ends.
    """

    def __init__(self, log_dir: Path, home: Mapping[str, str]) -> None:
        self.log_dir = log_dir
        self.started: list[Started] = []
        self.run_id = secrets.token_hex(16)
        self._home = dict(home)
        self._spawned = 0
        self._stores: list[Path] = []
        self._ports: list[socket.socket] = []
        self._nodes: dict[tuple[str, str], NodeConnection] = {}  # by role and host
        self._unsure: dict[Place, list[str]] = {}  # keys of remote ranks that may live, though they were killed
        self._refreshed_at = time.monotonic()

    def start(self, plan: RolePlan, *, module: str = "", without: Collection[int] = ()) -> None:
        """Start a role's processes, `without` these ranks of other hosts; return at once. Logs go to
        `log_dir/<role>/rank<N>.log`.

        `module` ("module:function") makes the role's handlers instead of `workers/roles/<role>.py`.
        """
        folder = self.log_dir.absolute() / plan.role
        folder.mkdir(parents=True, exist_ok=True)
        more = ("--module", module) if module else ()
        env = self._environment(plan)
        port = str(plan.meeting.port or self._reserve_port()) if plan.world_size_of_group > 1 else ""
        if plan.world_size_of_group > 1 and plan.nodes == 1:
            env["RLCTL_GROUP_STORE"] = str(self._make_store_folder() / plan.role)
        if plan.launcher == "python":
            for rank in plan.here:
                self._spawn_rank(plan, rank, more, env | _place(plan, rank, port))
            for node in plan.remote:
                for rank in plan.ranks_of(node.node_rank):
                    if rank not in without:
                        self._start_remote_rank(plan, node, rank, more)
            return
        env["RLCTL_LOG_DIR"] = str(folder)
        meeting_port = port or str(self._reserve_port())
        command = (*(word.replace(FREE_PORT, meeting_port) for word in plan.command), *more)
        log_path = folder / "launcher.log"
        if plan.launcher == "srun":
            env |= {"MASTER_ADDR": plan.meeting.address, "MASTER_PORT": port}
            supervisor = (sys.executable, "-m", "workers.node")  # srun does not end by itself when the driver dies
            ranks = tuple(range(plan.processes))
            self._spawn(plan.role, ranks, (*supervisor, *command), env, log_path, launcher="srun", ends_with_stdin=True)
            return
        self._spawn(plan.role, plan.ranks_of(0), command, env, log_path, launcher=plan.launcher)
        for node in plan.remote:
            self._start_remote(plan, node, more, env["RLCTL_LOG_DIR"])

    def _make_store_folder(self) -> Path:
        """Make a folder that only this user can enter, for the file in which ranks on this host meet (torch's
        `FileStore`). The run directory may be on a network file system, where locks are slow or missing."""
        self._stores.append(Path(tempfile.mkdtemp(prefix="rlctl-")))
        return self._stores[-1]

    def _reserve_port(self) -> int:
        """Bind a port, so that the kernel gives it to nobody else until `stop`. A store that sets SO_REUSEADDR, as
        torch's do, may listen there."""
        held = socket.socket()
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((LOOPBACK, 0))
        self._ports.append(held)
        return int(held.getsockname()[1])

    def start_again(self, plan: RolePlan, rank: int, *, module: str = "", remark: str = "") -> None:
        """Start one replica again, after `kill`. Its log continues below a line with the `remark`."""
        assert plan.launcher == "python", f"{plan.launcher} starts {plan.role} as a whole"
        assert plan.world_size_of_group == 1, f"ranks of {plan.role} need one another"
        with self.log_path(plan.role, rank).open("a", encoding="utf-8") as log_file:
            log_file.write(f"\n── {remark} ──\n")
        more = ("--module", module) if module else ()
        if (node := plan.remote_of(rank)) is not None:
            self._start_remote_rank(plan, node, rank, more)
        else:
            self._spawn_rank(plan, rank, more, self._environment(plan) | _place(plan, rank, ""))

    def kill(self, role: str, rank: int, *, wait: bool = True) -> None:
        """SIGKILL what is left of a rank that has a process of its own, with all that it started, and forget it.
        `wait`: for its host, where that is another one, to report that it has ended."""
        for started in [one for one in self.started if one.role == role and one.ranks == (rank,)]:
            if isinstance(started.process, RemoteRank):
                self._kill_remote_rank(started.process, (role, rank), _REMOTE_KILL_S if wait else 0.0)
                self.started.remove(started)
                continue
            left = _kill_all_of([started])
            try:
                started.process.wait(_KILL_TIMEOUT_S)  # it loses its environment, and with it the mark, before it ends
            except subprocess.TimeoutExpired:
                left.append(started.process.pid)
            if left:
                log.error("processes of %s rank %d that could not be ended: %s", role, rank, left)
            self.started.remove(started)

    def seek(self, plan: RolePlan, rank: int, *, module: str = "") -> None:
        """Start a rank on a host that may not be there yet. It may end at once; `give_up` forgets it then."""
        if any(one.role == plan.role and one.ranks == (rank,) for one in self.started):
            return
        node = plan.remote_of(rank)
        assert node is not None, f"{plan.role} rank {rank} is on this host"
        self._start_remote_rank(plan, node, rank, ("--module", module) if module else ())

    def give_up(self, role: str, rank: int) -> None:
        """Forget a rank that was sought, with the connection to its host where nobody has answered there."""
        for started in [one for one in self.started if one.role == role and one.ranks == (rank,)]:
            process = started.process
            if isinstance(process, RemoteRank) and not process.node.ready:
                process.node.give_up()
                self.started.remove(started)
            else:
                self.kill(role, rank)

    def _spawn_rank(self, plan: RolePlan, rank: int, more: tuple[str, ...], env: Mapping[str, str]) -> None:
        log_path = self.log_dir.absolute() / plan.role / f"rank{rank}.log"
        self._spawn(plan.role, (rank,), (*plan.command, *more), dict(env), log_path)

    def _start_remote_rank(self, plan: RolePlan, node: RemoteNode, rank: int, more: tuple[str, ...]) -> None:
        """Start a rank that has a process of its own on another host, through the supervisor there."""
        connection = self._nodes.get((plan.role, node.host))
        if connection is None or connection.ended:
            if connection is not None:
                connection.close()
            connection = self._nodes[plan.role, node.host] = self._connect(plan, node)
        for key in self._unsure.pop((plan.role, rank), []):
            connection.send({"kill": key})
        log_path, mark = self.log_dir.absolute() / plan.role / f"rank{rank}.log", self._new_mark()
        process = RemoteRank(connection, mark)
        process.start((*node.command, *more), _place(plan, rank, ""), log_path)
        self.started.append(Started(plan.role, (rank,), process, log_path, host=node.host, mark=mark))

    def _connect(self, plan: RolePlan, node: RemoteNode) -> NodeConnection:
        log_path = self.log_dir.absolute() / plan.role / f"launcher_{node.host}.log"
        env = dict(os.environ) | {_OWN_MARK: self._new_mark()}
        shell = _popen(node.shell, env, log_path, key="cluster.remote_shell", pipes=True)
        script = self._remote_script(plan, node, (plan.python, "-m", "workers.node"))
        connection = NodeConnection(node.host, shell, script, log_path)
        connection.open()
        return connection

    def _kill_remote_rank(self, process: RemoteRank, place: Place, wait_s: float) -> None:
        """End a rank on another host. A host that does not answer has lost its connection, and all its ranks of the
        role with it."""
        if not process.kill(wait_s):
            self._unsure.setdefault(place, []).append(process.key)
            process.node.give_up()

    def _start_remote(self, plan: RolePlan, node: RemoteNode, more: tuple[str, ...], log_dir: str) -> None:
        """Start a node of a role through the remote shell, which reads what to run, secrets too, from its input."""
        command = (plan.python, "-m", "workers.node", *node.command, *more)
        script = self._remote_script(plan, node, command, {"RLCTL_LOG_DIR": log_dir})
        self._spawn(
            plan.role,
            plan.ranks_of(node.node_rank),
            node.shell,
            dict(os.environ),
            Path(log_dir) / f"launcher_{node.host}.log",
            launcher=plan.launcher,
            host=node.host,
            ends_with_stdin=True,
        )
        process = self.started[-1].process
        assert isinstance(process, subprocess.Popen)
        _feed(process, script.encode())

    def _remote_script(
        self, plan: RolePlan, node: RemoteNode, command: Sequence[str], more: Mapping[str, str] = MappingProxyType({})
    ) -> str:
        shared = {name: value for name, value in os.environ.items() if name.startswith(SHARED_PREFIXES)}
        return remote_script({**shared, **node.env, **self._ours(plan), **more}, command)

    def keep_connections_open(self) -> None:
        """Send an empty line now and then: supervisors do not read it."""
        if time.monotonic() - self._refreshed_at < CONNECTION_SILENCE_S:
            return
        self._refreshed_at = time.monotonic()
        for shell in self._shells():
            _feed(shell, b"\n")

    def _shells(self) -> list[subprocess.Popen[bytes]]:
        """Return the processes that end with their standard input."""
        own = [started.process for started in self.started if started.ends_with_stdin]
        return [
            *(process for process in own if isinstance(process, subprocess.Popen)),
            *(connection.shell for connection in self._nodes.values()),
        ]

    def log_path(self, role: str, rank: int) -> Path:
        return self.log_dir / role / f"rank{rank}.log"

    def stop(self, grace_s: float = 5.0) -> None:
        """End everything: SIGTERM to each process group, `grace_s` to obey, SIGKILL, then a search for stragglers."""
        here = [one for one in self.started if not (one.ends_with_stdin or isinstance(one.process, RemoteRank))]
        shells = self._shells()
        for shell in shells:
            _hang_up(shell)
        _signal_groups(here, signal.SIGTERM)
        _signal_groups(self.started, signal.SIGCONT)  # a stopped process obeys only once it goes on
        _wait_for_all([*self._processes, *shells], grace_s)
        _kill_all_of(here)
        # A remote shell that is killed early leaves nobody to say that its host is clean.
        _wait_for_all([*self._processes, *shells], _REMOTE_GRACE_S)
        for shell in shells:
            signal_group(shell.pid, signal.SIGKILL)
        _wait_for_all([*self._processes, *shells], _KILL_TIMEOUT_S)
        left = kill_marked(self._mark, _KILL_TIMEOUT_S)
        if left:
            log.error("processes that could not be ended: %s", left)
        for connection in self._nodes.values():
            connection.close()
        for folder in self._stores:
            shutil.rmtree(folder, ignore_errors=True)
        for held in self._ports:
            held.close()

    def wait(self, timeout_s: float) -> bool:
        """Wait for every started process to end by itself; return False when some did not in time."""
        return _wait_for_all(self._processes, timeout_s)

    @property
    def _processes(self) -> list[subprocess.Popen[bytes] | RemoteRank]:
        return [started.process for started in self.started]

    def leftover(self) -> list[int]:
        """Return processes of this run that still exist, found by the mark in their environment (Linux)."""
        return pids_marked(self._mark)

    @property
    def _mark(self) -> str:
        return f"RLCTL_RUN_ID={self.run_id}"

    def _environment(self, plan: RolePlan) -> dict[str, str]:
        ours = self._ours(plan)
        return base_environment() | plan.env | ours | {"RLCTL_PARENT_PID": str(os.getpid())}

    def _ours(self, plan: RolePlan) -> dict[str, str]:
        """Return what makes a process a rank of this run, on any host."""
        place = {"RLCTL_RUN_ID": self.run_id, "RLCTL_GROUP_SIZE": str(plan.world_size_of_group)}
        dumps = {"RLCTL_DUMP_DIR": str(self.log_dir.absolute() / plan.role)}
        return self._home | place | dumps | {"PYTHONPATH": python_path(plan, self.log_dir)}

    def _spawn(
        self,
        role: str,
        ranks: tuple[int, ...],
        command: tuple[str, ...],
        env: dict[str, str],
        log_path: Path,
        *,
        launcher: str = "",
        host: str = "",
        ends_with_stdin: bool = False,
    ) -> None:
        mark = self._new_mark()
        process = _popen(command, env | {_OWN_MARK: mark}, log_path, key=f"{role}.python", stdin=ends_with_stdin)
        self.started.append(Started(role, ranks, process, log_path, launcher, host, ends_with_stdin, mark))

    def _new_mark(self) -> str:
        self._spawned += 1
        return f"{self.run_id}.{self._spawned}"


def _popen(
    command: Sequence[str],
    env: Mapping[str, str],
    log_path: Path,
    *,
    key: str,
    stdin: bool = False,
    pipes: bool = False,
) -> subprocess.Popen[bytes]:
    """Start a process with its output in a log. `stdin`: it has an input; `pipes`: its input and output are pipes.
    Raise SpecError that names `key`."""
    with log_path.open("ab") as output:
        try:
            return subprocess.Popen(
                command,
                env=dict(env),
                stdin=subprocess.PIPE if stdin or pipes else subprocess.DEVNULL,
                stdout=subprocess.PIPE if pipes else output,
                stderr=output,
                start_new_session=True,  # Ctrl-C reaches the driver only, and the whole group can be signalled
            )
        except OSError as error:
            hint = "name a program that exists, or leave the key out"
            raise SpecError([Problem(key, f"cannot be started: {error.strerror}", hint, command[0])]) from None


def base_environment() -> dict[str, str]:
    """Return this process's environment, without what a launcher above it set for it."""
    return {name: value for name, value in os.environ.items() if name not in (*LAUNCHER_VARIABLES, *_OUR_VARIABLES)}


def python_path(plan: RolePlan, folder: Path) -> str:
    """Return the plan's path. Where our packages lie in a site-packages folder, another interpreter gets a folder of
    links to them alone, made in `folder`: it must not see this interpreter's torch."""
    root, path = package_root(), plan.env.get("PYTHONPATH", str(package_root()))
    if plan.python == sys.executable or root.name not in ("site-packages", "dist-packages"):
        return path
    links = folder / "packages"
    links.mkdir(parents=True, exist_ok=True)
    for name in _PACKAGES:
        if not (links / name).is_symlink():
            (links / name).symlink_to(root / name)
    return path.replace(str(root), str(links), 1)


def remote_script(env: Mapping[str, str], command: Sequence[str]) -> str:
    """Return what a POSIX shell on another host reads to become `command`, in the driver's folder."""
    exports = [f"export {name}={shlex.quote(value)}" for name, value in sorted(env.items())]
    return "\n".join([f"cd {shlex.quote(os.getcwd())} || exit 1", *exports, f"exec {shlex.join(command)}", ""])


def _wait_for_all(processes: Sequence[subprocess.Popen[bytes] | RemoteRank], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while any(process.poll() is None for process in processes):
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.01)
    return True


def _feed(process: subprocess.Popen[bytes], text: bytes) -> None:
    """Write to a process's input; one that has ended is noticed as any process."""
    assert process.stdin is not None
    with suppress(BrokenPipeError, ValueError):
        process.stdin.write(text)
        process.stdin.flush()


def _hang_up(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    with suppress(BrokenPipeError):
        process.stdin.close()


def _signal_groups(those: Iterable[Started], number: signal.Signals) -> None:
    for started in those:
        if isinstance(started.process, subprocess.Popen):
            signal_group(started.process.pid, number)


def _kill_all_of(those: Iterable[Started]) -> list[int]:
    """SIGKILL these and all that they started; return what would not end."""
    left = []
    for started in those:
        left += kill_marked(f"{_OWN_MARK}={started.mark}", _KILL_TIMEOUT_S)
        _signal_groups([started], signal.SIGKILL)  # where no mark can be read
    return left


def describe_exit(code: int) -> str:
    """Describe an exit code in words."""
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
