"""A keeper of ranks on another host: what it forks, what it starts, and how either ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from probe_groups import wait_until

from rlctl.processes.placement import package_root
from workers.node import PREFIX

RANK = [sys.executable, "-m", "workers.main", "--role", "probe", "--module", "sitting:down"]
# A rank that gets no further than to what it waits for here.
SITTING = """
import os, sys, time
from workers import main
def sit(self, *_):
    print("sits", os.environ["RLCTL_PROCESS"], os.environ.get("MORE"), "torch" in sys.modules, flush=True)
    time.sleep(600)
main.Link.connect = sit
"""


class Line:
    """The driver's end."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self.process, self.folder = process, folder

    def say(self, **message: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        return dict(json.loads(self.process.stdout.readline().removeprefix(PREFIX)))

    def start(self, key: str, command: list[str], **env: str) -> Path:
        log = self.folder / f"{key}.log"
        self.say(start=key, command=command, env={"RLCTL_RANK": "0", "RLCTL_SIZE": "1", **env}, log=str(log))
        return log

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children()


@contextmanager
def keeper(folder: Path) -> Iterator[Line]:
    (folder / "sitecustomize.py").write_text(SITTING)
    home = {"RLCTL_ADDRESS": "tcp://127.0.0.1:9", "RLCTL_SECRET": "s", "RLCTL_CURVE_KEY": "k"}
    env = {**os.environ, **home, "PYTHONPATH": f"{folder}{os.pathsep}{package_root()}"}
    with subprocess.Popen(
        [sys.executable, "-m", "workers.node"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, text=True
    ) as process:
        line = Line(process, folder)
        try:
            assert line.hear() == {"ready": True}
            yield line
        finally:
            children = line.children()
            assert process.stdin is not None
            process.stdin.close()
            assert process.wait(60) == 0
            assert not psutil.wait_procs(children, 60)[1]


def test_ranks_are_forks_with_a_session_a_log_and_variables_of_their_own(tmp_path: Path) -> None:
    with keeper(tmp_path) as line:
        logs = [line.start(key, RANK) for key in ("a", "b")]
        assert wait_until(lambda: all(log.exists() and "sits" in log.read_text() for log in logs))
        assert [log.read_text() for log in logs] == ["sits a None False\n", "sits b None False\n"]
        ranks = line.children()
        assert all("workers.node" in rank.cmdline() for rank in ranks)
        assert [os.getsid(rank.pid) for rank in ranks] == [rank.pid for rank in ranks]
        assert {rank.name() for rank in ranks} == {"rlctl-probe0"}
        line.say(kill="a")
        assert line.hear() == {"ended": "a", "code": -9}
        assert len(line.children()) == 1


def test_a_fork_that_fails_says_why_in_its_log_and_how_it_ended(tmp_path: Path) -> None:
    with keeper(tmp_path) as line:
        log = line.start("a", [*RANK[:3], "--wrong"])
        assert line.hear() == {"ended": "a", "code": 2}
        assert "unrecognized arguments: --wrong" in log.read_text() or "required: --role" in log.read_text()


@pytest.mark.parametrize(
    ("command", "env"),
    [(RANK, {"OMP_NUM_THREADS": "1"}), ([f"{sys.prefix}/bin/../bin/python", *RANK[1:]], {})],
    ids=["variables", "interpreter"],
)
def test_what_a_fork_would_not_be_is_started(tmp_path: Path, command: list[str], env: dict[str, str]) -> None:
    with keeper(tmp_path) as line:
        log = line.start("a", command, **env)
        assert wait_until(lambda: log.exists() and "sits" in log.read_text())
        (rank,) = line.children()
        assert "workers.main" in rank.cmdline()
