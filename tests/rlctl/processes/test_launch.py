"""Starting and ending processes: logs, environments, and that nothing survives `stop`."""

from __future__ import annotations

import os
import signal
import socket
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from probe_groups import left_of, role_plan, wait_until

from rlctl.processes.launch import Launcher, tail
from rlctl.processes.placement import RolePlan

STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print("ready", child.pid, flush=True)
time.sleep(600)
"""
SPEAKS = "import os, sys; print(os.environ[sys.argv[1]], flush=True)"


def _plan(code: str, *args: str, processes: int = 1, **changes: object) -> RolePlan:
    plan = role_plan("actor", processes)
    return replace(plan, command=(sys.executable, "-c", code, *args), **changes)  # type: ignore[arg-type]


def test_one_replica_is_killed_with_its_runaway_child_and_started_again(tmp_path: Path) -> None:
    """Their children leave the process group; at last all are stopped, though none heeds SIGTERM."""
    launcher = Launcher(tmp_path, {})
    plan = _plan(STUBBORN, processes=2)
    launcher.start(plan)
    try:
        logs = [launcher.log_path("actor", rank) for rank in (0, 1)]
        assert wait_until(lambda: all("ready" in tail(path) for path in logs))
        assert wait_until(lambda: len(left_of(launcher)) == 4)
        neighbour = launcher.started[0].process
        launcher.kill("actor", 1)
        assert [started.ranks for started in launcher.started] == [(0,)]
        assert len(left_of(launcher)) == 2
        assert neighbour.poll() is None
        launcher.start_again(plan, 1, 1)
        assert wait_until(lambda: tail(logs[1]).count("ready") == 2)
        assert "── actor rank 1 is started again ──" in tail(logs[1])
        assert launcher.started[1].ranks == (1,)
    finally:
        launcher.stop(grace_s=0.2)
    assert left_of(launcher) == []
    assert neighbour.returncode == -signal.SIGKILL


def test_each_process_has_its_place_and_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "9")
    monkeypatch.setenv("WORLD_SIZE", "10")
    group = _plan("import os; print(*(os.environ.get(n) for n in ('RANK', 'WORLD_SIZE', 'RLCTL_RANK', 'HOME_')))")
    launcher = Launcher(tmp_path, {"HOME_": "here"})
    launcher.start(replace(group, processes=2, world_size_of_group=2))
    assert launcher.wait(90)
    launcher.stop(grace_s=0.2)
    assert [tail(launcher.log_path("actor", rank)) for rank in (0, 1)] == ["0 2 0 here", "1 2 1 here"]
    alone = Launcher(tmp_path / "alone", {})
    alone.start(group)  # a launcher's variables in the driver's own environment do not leak
    assert alone.wait(90)
    assert tail(alone.log_path("actor", 0)) == "None None 0 None"


def test_no_other_process_is_given_the_port_of_a_group(tmp_path: Path) -> None:
    launcher = Launcher(tmp_path, {})
    launcher.start(replace(_plan(SPEAKS, "MASTER_PORT", processes=2), world_size_of_group=2))
    try:
        assert launcher.wait(90)
        (port,) = {int(tail(launcher.log_path("actor", rank))) for rank in (0, 1)}
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind(("127.0.0.1", port))
        socket.create_server(("127.0.0.1", port)).close()  # sets SO_REUSEADDR, as torch's stores do
    finally:
        launcher.stop(grace_s=0.2)
    assert wait_until(lambda: can_bind(port))  # though another process may have it for a while


def can_bind(port: int) -> bool:
    with socket.socket() as stranger, suppress(OSError):
        stranger.bind(("127.0.0.1", port))
        return True
    return False


def test_another_interpreter_does_not_see_this_ones_site_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "lib" / "site-packages"
    for name in ("rlctl", "specs", "workers", "backends", "torch"):
        (root / name).mkdir(parents=True)
    monkeypatch.setattr("specs.packages._ROOT", root)
    launcher = Launcher(tmp_path / "logs", {})
    env = {"PYTHONPATH": f"{root}{os.pathsep}/users/own"}
    spoken = []
    for python in ({"python": "/another/python"}, {}):  # one after the other: they have the same log
        launcher.start(_plan(SPEAKS, "PYTHONPATH", env=env, **python))
        assert launcher.wait(90)
        spoken.append(tail(launcher.log_path("actor", 0)).splitlines()[-1])
    links = tmp_path / "logs" / "packages"
    first, second = spoken
    assert {first, second} == {f"{links}{os.pathsep}/users/own", f"{root}{os.pathsep}/users/own"}
    assert sorted(path.name for path in links.iterdir()) == ["backends", "rlctl", "specs", "workers"]
