"""A supervisor of processes on another host: what it reports, and that nothing outlives its connection."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from probe_groups import wait_until

from rlctl.processes import node_connection
from rlctl.processes.launch import remote_script
from rlctl.processes.node_connection import NodeConnection
from rlctl.processes.shells import LocalShell
from specs.packages import package_root
from workers.node import PREFIX
from workers.watchdog import kill_marked, pids_marked

# It ignores SIGTERM, and its child leaves its session.
STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print("ready", os.environ["MORE"], os.getsid(0) == os.getpid(), flush=True)
time.sleep(600)
"""


def test_a_supervisor_that_is_stopped_is_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_connection, "_PAUSE_S", 0.5)
    beats_often = "from workers import node; node._BEAT_S = 0.2; node.Supervisor().run()"
    mark, log = f"SECRET=of {tmp_path}", tmp_path / "log"
    env = {**os.environ, "PYTHONPATH": str(package_root()), "SECRET": f"of {tmp_path}"}
    script = remote_script({}, [sys.executable, "-c", beats_often])
    connection = NodeConnection("there", LocalShell(("sh",), env, log), script, log)

    def silent_s() -> float:
        connection.receive()
        return connection.silent_s

    assert wait_until(lambda: silent_s() > 0)
    (pid,) = pids_marked(mark)
    try:
        os.kill(pid, signal.SIGSTOP)
        assert wait_until(lambda: silent_s() > 1.2)
        time.sleep(0.7)
        assert silent_s() == 0, "nobody listened meanwhile"
        assert wait_until(lambda: silent_s() > 1.2)
        os.kill(pid, signal.SIGCONT)
        assert wait_until(lambda: silent_s() < 0.2, 5), "it says that it lives"
    finally:
        os.kill(pid, signal.SIGCONT)
        connection.close()
        assert wait_until(lambda: connection.shell.poll() is not None)


def test_processes_are_started_killed_and_end_with_the_connection(tmp_path: Path) -> None:
    mark = f"SECRET=of {tmp_path}"
    env = {**os.environ, "PYTHONPATH": str(package_root()), "SECRET": f"of {tmp_path}"}
    command = [sys.executable, "-m", "workers.node"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, text=True) as node:
        assert node.stdin is not None
        assert node.stdout is not None

        def send(**message: object) -> None:
            print(json.dumps(message), file=node.stdin, flush=True)

        def hear() -> object:
            while (message := json.loads(node.stdout.readline().removeprefix(PREFIX))) == {"alive": True}:
                pass
            return message

        assert hear() == {"ready": True}
        logs = [tmp_path / f"{key}.log" for key in ("a", "b")]
        for key, log in zip("ab", logs, strict=True):
            send(start=key, command=[sys.executable, "-c", STUBBORN], env={"MORE": key}, log=str(log))
        try:
            assert wait_until(lambda: all(log.exists() and log.read_text() for log in logs))
            assert [log.read_text() for log in logs] == ["ready a True\n", "ready b True\n"]
            assert wait_until(lambda: len(pids_marked(mark)) == 5)
            send(kill="a")
            assert hear() == {"ended": "a", "code": -9}
            assert len(pids_marked(mark)) == 3
            send(start="c", command=[sys.executable, "-c", "exit(3)"], env={}, log=str(logs[0]))
            assert hear() == {"ended": "c", "code": 3}
            node.stdin.close()
            assert node.wait(60) == 0
            assert pids_marked(mark) == []
        finally:
            kill_marked(mark, 10)
