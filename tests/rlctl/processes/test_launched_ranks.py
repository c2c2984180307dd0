"""Which rank below a launcher ended first: as this host sees it, and as torchrun reports it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from probe_groups import wait_until

from rlctl.processes.launched_ranks import FirstEnd, LaunchedRanks, first_of, root_cause

LAUNCHER = """
import subprocess, sys, time
ranks = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
print(*[rank.pid for rank in ranks], flush=True)
while True:
    time.sleep(0.01)
    if "waits" in sys.argv:
        [rank.poll() for rank in ranks]
"""
REPORT = """\
E1122 01:26:10.456000 4711 torch/distributed/elastic/multiprocessing/api.py:986] failed (exitcode: -9) local_rank: 1 (pid: 4713)
============================================================
workers.main FAILED
------------------------------------------------------------
Failures:
[1]:
  rank      : 0 (local_rank: 0)
  exitcode  : 1 (pid: 4712)
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-22_01:26:09
  host      : node
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 4713)
  error_file: <N/A>
  traceback : Signal 9 (SIGKILL) received by PID 4713
============================================================
"""  # noqa: E501


@pytest.fixture(params=["", "waits"])
def launcher(request: pytest.FixtureRequest) -> Iterator[tuple[subprocess.Popen[str], list[int], bool]]:
    command = [sys.executable, "-c", LAUNCHER, request.param]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        try:
            yield process, [int(pid) for pid in process.stdout.readline().split()], bool(request.param)
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def test_the_first_to_end_is_seen_once_with_its_signal_where_that_is_known(launcher) -> None:
    process, pids, waits = launcher
    ranks = LaunchedRanks()
    for rank, pid in enumerate(pids):
        ranks.watch(("actor", rank), pid, process.pid)
        assert ("actor", rank) in ranks
    ranks.watch(("rollout", 0), os.getpid(), process.pid)
    assert ("rollout", 0) not in ranks, "it does not descend from the launcher"
    assert ranks.first_ended() == []
    found: list[FirstEnd] = []
    os.kill(pids[1], signal.SIGKILL)
    assert wait_until(lambda: found.extend(ranks.first_ended()) or found)
    assert found[0] in ([FirstEnd("actor", 1, None), FirstEnd("actor", 1, -9)] if waits else [FirstEnd("actor", 1, -9)])
    os.kill(pids[0], signal.SIGKILL)
    assert wait_until(lambda: not ranks.first_ended() and not ranks._running)


@pytest.mark.parametrize(
    ("codes", "first"),
    [
        ({0: -15, 1: None}, 1),  # its launcher has taken the code of the first one, and then ended the other
        ({0: -6, 1: -9}, 1),  # it aborted itself when the other was gone
        ({0: 1, 1: None}, 1),
        ({0: -15, 1: 1}, 1),
        ({0: -9, 1: None}, 1),  # a launcher may have ended the other with SIGKILL
        ({0: -9, 1: -11}, 1),
    ],
)
def test_of_ranks_that_ended_together_the_first_is_found(codes: dict[int, int | None], first: int) -> None:
    assert first_of("actor", codes) == FirstEnd("actor", first, codes[first], (1 - first,))


def test_torchrun_reports_the_root_cause(tmp_path: Path) -> None:
    log = tmp_path / "launcher.log"
    log.write_text("rank 7 says: exitcode  : 3\n" + REPORT)
    assert root_cause(log) == (1, -9)
    log.write_text("killed before it could say anything\n")
    assert root_cause(log) is None
    assert root_cause(tmp_path / "none") is None
