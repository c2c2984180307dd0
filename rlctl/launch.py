"""Starting and ending the processes of a run. Whatever happens, nothing is left running."""

from __future__ import annotations

import logging
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rlctl.plan import LAUNCHER_VARIABLES, RolePlan, package_root
from specs.errors import Problem, SpecError

log = logging.getLogger("rlctl.launch")

_OUR_VARIABLES = ("RLCTL_LOG_DIR", "RLCTL_RANK", "RLCTL_SIZE", "RLCTL_GROUP_SIZE", "RLCTL_CURVE_KEY")
_PACKAGES = ("rlctl", "specs", "workers", "backends")
_KILL_TIMEOUT_S = 10.0
_TORCHRUN_ROOT_CAUSE = re.compile(r"Root Cause.*?rank\s*:\s*(\d+).*?exitcode\s*:\s*(-?\d+)", re.DOTALL)


@dataclass(frozen=True)
class Started:
    """A process the driver started: one rank, or a launcher of several."""

    role: str
    ranks: tuple[int, ...]
    process: subprocess.Popen[bytes]
    log_path: Path

    @property
    def is_launcher(self) -> bool:
        return self.log_path.name == "launcher.log"


class Launcher:
    """Processes of one run. `home` is what a rank needs to dial home (`Hub.environment`).

    `start` must be called from the main thread: the kernel ends a rank when the *thread* that started it ends.
    """

    def __init__(self, log_dir: Path, home: Mapping[str, str]) -> None:
        self.log_dir = log_dir
        self.started: list[Started] = []
        self.run_id = secrets.token_hex(16)
        self._home = dict(home)

    def start(self, plan: RolePlan, *, module: str = "") -> None:
        """Start a role's processes; returns at once. Logs go to `log_dir/<role>/rank<N>.log`.

        `module` ("module:function") makes the role's handlers instead of `workers/<role>.py`.
        """
        folder = self.log_dir / plan.role
        folder.mkdir(parents=True, exist_ok=True)
        command = (*plan.command, *(("--module", module) if module else ()))
        env = self._environment(plan)
        if plan.launcher == "torchrun":
            env["RLCTL_LOG_DIR"] = str(folder)
            self._spawn(plan.role, tuple(range(plan.processes)), command, env, folder / "launcher.log")
            return
        port = str(_free_port()) if plan.world_size_of_group > 1 else ""
        for rank in range(plan.processes):
            place = _place(plan, rank, port)
            self._spawn(plan.role, (rank,), command, env | place, folder / f"rank{rank}.log")

    def log_path(self, role: str, rank: int) -> Path:
        return self.log_dir / role / f"rank{rank}.log"

    def stop(self, grace_s: float = 5.0) -> None:
        """End everything: SIGTERM to each process group, `grace_s` to obey, SIGKILL, then a search for stragglers."""
        self._signal_groups(signal.SIGTERM)
        self._signal_groups(signal.SIGCONT)  # a stopped process obeys only once it goes on
        self.wait(grace_s)
        self._signal_groups(signal.SIGKILL)
        self.wait(_KILL_TIMEOUT_S)
        deadline = time.monotonic() + _KILL_TIMEOUT_S
        while (left := self.leftover()) and time.monotonic() < deadline:
            for pid in left:
                _kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        if left:
            log.error("processes that could not be ended: %s", left)

    def wait(self, timeout_s: float) -> bool:
        """Wait for every started process to end by itself; False when some did not in time."""
        deadline = time.monotonic() + timeout_s
        while any(started.process.poll() is None for started in self.started):
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.01)
        return True

    def leftover(self) -> list[int]:
        """Processes of this run that still exist, found by the mark in their environment (Linux)."""
        mark = f"RLCTL_RUN_ID={self.run_id}".encode()
        return [pid for pid in _all_pids() if mark in _environ_of(pid)]

    def _environment(self, plan: RolePlan) -> dict[str, str]:
        base = {name: value for name, value in os.environ.items() if name not in (*LAUNCHER_VARIABLES, *_OUR_VARIABLES)}
        ours = {
            "RLCTL_RUN_ID": self.run_id,
            "RLCTL_PARENT_PID": str(os.getpid()),
            "RLCTL_GROUP_SIZE": str(plan.world_size_of_group),
        }
        return base | plan.env | self._home | ours | {"PYTHONPATH": self._python_path(plan)}

    def _python_path(self, plan: RolePlan) -> str:
        """The plan's path; but where our packages lie in a site-packages folder, another interpreter gets a folder of
        links to them alone: it must not see this interpreter's torch."""
        root, path = package_root(), plan.env.get("PYTHONPATH", str(package_root()))
        if plan.python == sys.executable or root.name not in ("site-packages", "dist-packages"):
            return path
        links = self.log_dir / "packages"
        links.mkdir(parents=True, exist_ok=True)
        for name in _PACKAGES:
            if not (links / name).is_symlink():
                (links / name).symlink_to(root / name)
        return path.replace(str(root), str(links), 1)

    def _spawn(
        self, role: str, ranks: tuple[int, ...], command: tuple[str, ...], env: dict[str, str], log_path: Path
    ) -> None:
        with log_path.open("ab") as output:
            try:
                process = subprocess.Popen(
                    command,
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C reaches the driver only, and the whole group can be signalled
                )
            except OSError as error:
                hint = "name an interpreter that exists, or leave the key out"
                reason = f"cannot be started: {error.strerror}"
                raise SpecError([Problem(f"{role}.python", reason, hint, command[0])]) from None
        self.started.append(Started(role, ranks, process, log_path))

    def _signal_groups(self, number: signal.Signals) -> None:
        for started in self.started:
            try:
                os.killpg(started.process.pid, number)  # also after its leader's end: its children may live
            except (ProcessLookupError, PermissionError):
                continue


def describe_exit(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"its process ended with exit code {code}"
    try:
        return f"its process was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"its process was ended by signal {-code}"


def blamed_by_torchrun(log_path: Path) -> tuple[int, int] | None:
    """(rank, exit code) of the first failure in torchrun's closing report; None where there is no report."""
    found = _TORCHRUN_ROOT_CAUSE.findall(tail(log_path, lines=200))
    return (int(found[-1][0]), int(found[-1][1])) if found else None


def tail(path: Path, lines: int = 20) -> str:
    """Last lines of a log; empty when there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 65536))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-lines:])


def _place(plan: RolePlan, rank: int, port: str) -> dict[str, str]:
    place = {"RLCTL_RANK": str(rank), "RLCTL_SIZE": str(plan.processes), "LOCAL_RANK": str(rank)}
    if not port:
        return place
    group = {"RANK": str(rank), "WORLD_SIZE": str(plan.processes), "LOCAL_WORLD_SIZE": str(plan.processes)}
    return place | group | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _all_pids() -> Iterable[int]:
    try:
        names = os.listdir("/proc")
    except OSError:
        return []
    return [int(name) for name in names if name.isdecimal() and int(name) != os.getpid()]


def _environ_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()  # empty for a zombie
    except OSError:
        return b""


def _kill(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return
