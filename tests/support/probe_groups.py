"""Groups of real processes whose role is `probe_role`."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlctl.processes.groups import Groups
from rlctl.processes.launch import Launcher
from rlctl.processes.placement import Plan, RolePlan
from rlctl.processes.shells import Cluster
from specs.packages import package_root
from specs.wire.heartbeat import Activity
from workers.watchdog import pids_marked

SUPPORT = Path(__file__).resolve().parent


def role_plan(role: Any, processes: int, launcher: str = "python", *, group: bool = False) -> RolePlan:
    """A role's plan; `group`: its processes count as one group, as those of a trainer."""
    command: tuple[str, ...] = (sys.executable, "-m", "workers.main", "--role", role)
    if launcher == "torchrun":
        run = ("-m", "backends.torchrun", "--rdzv-endpoint", "127.0.0.1:{port}", "--nproc-per-node", str(processes))
        command = (sys.executable, *run, *command[1:])
    env = {"PYTHONPATH": f"{package_root()}{os.pathsep}{SUPPORT}", "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}
    size = processes if group or launcher == "torchrun" else 1
    return RolePlan(role, processes, launcher, sys.executable, command, env, (), 1, size)


def handled_by(plan: RolePlan, target: str) -> RolePlan:
    """A plan whose handlers `target` makes ("module:function"), and not `workers/roles/<role>.py`."""
    more = ("--module", target)
    remote = tuple(replace(node, command=(*node.command, *more)) for node in plan.remote)
    return replace(plan, command=(*plan.command, *more), remote=remote)


@contextmanager
def probe_groups(
    log_dir: Path,
    *plans: RolePlan,
    module: str = "probe_role",
    factory: str = "handlers",
    start: bool = True,
    cluster: Cluster | None = None,
    **limits: Any,
) -> Iterator[Groups]:
    """Groups, started unless that is left to the test; on leaving, nothing of them may be left running."""
    probing = tuple(handled_by(plan, f"{module}:{factory}") for plan in plans)
    groups = Groups(Plan(probing, colocated=False, cluster=cluster), log_dir, **limits)
    try:
        with groups:
            if start:
                groups.start()
            yield groups
    finally:
        assert left_of(groups.launcher) == []
        assert all(started.process.poll() is not None for started in groups.launcher.started)


def left_of(launcher: Launcher) -> list[int]:
    """Return processes of a run that still exist."""
    return pids_marked(f"RLCTL_RUN_ID={launcher.run_id}")


def judge_silence_of(groups: Groups, role: str, rank: int, after_s: float = 1.5) -> None:
    """From now on this rank's silence counts after so many seconds, and no other rank's: on a busy machine any may be
    silent for as long."""
    for peer in groups.hub._peers.values():
        peer.reported = (peer.member.role, peer.member.rank) != (role, rank)
    groups.hub.heartbeat_timeout_s = after_s


def doing(groups: Groups, role: str, rank: int) -> Activity | None:
    """A rank's report on the verb that it serves; None: none yet."""
    waiting = groups.failures.waiting().get((role, rank))
    return None if waiting is None else groups.watch.of((role, rank), waiting)


def wait_until(condition: Any, timeout_s: float = 120.0) -> bool:
    """Look until `condition()` holds; False when it never did."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
