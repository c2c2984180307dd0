"""The end of real processes below a launcher: whether it has waited for them, or not yet."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from probe_groups import wait_until

from rlctl.processes.rank_processes import RankProcesses

LAUNCHER = """
import subprocess, sys, time
ranks = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
print(*[rank.pid for rank in ranks], flush=True)
while True:
    time.sleep(0.01)
    if "waits" in sys.argv:
        [rank.poll() for rank in ranks]
"""


@pytest.fixture(params=["", "waits"])
def launcher(request: pytest.FixtureRequest) -> Iterator[tuple[subprocess.Popen[str], list[int], bool]]:
    command = [sys.executable, "-c", LAUNCHER, request.param]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        try:
            yield process, [int(pid) for pid in process.stdout.readline().split()], bool(request.param)
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def test_the_first_to_end_is_seen_with_its_signal_where_that_is_known(launcher) -> None:
    process, pids, waits = launcher
    ranks = RankProcesses()
    for rank, pid in enumerate(pids):
        ranks.watch(("actor", rank), pid, process.pid)
        assert ("actor", rank) in ranks
    assert ranks.newly_ended() == []
    for rank in (1, 0):
        os.kill(pids[rank], signal.SIGKILL)
        found: list[object] = []
        assert wait_until(lambda found=found: found.extend(ranks.newly_ended()) or found)
        assert found in ([[(("actor", rank), None)], [(("actor", rank), -9)]] if waits else [[(("actor", rank), -9)]])
    assert ranks.newly_ended() == [], "each is told once"


def test_what_does_not_descend_from_the_launcher_is_not_watched(launcher) -> None:
    process, _, _ = launcher
    ranks = RankProcesses()
    ranks.watch(("actor", 0), os.getpid(), process.pid)
    ranks.watch(("actor", 1), 2**22 + 1, process.pid)  # beyond what Linux gives
    assert not any(("actor", rank) in ranks for rank in (0, 1))
    assert ranks.newly_ended() == []
