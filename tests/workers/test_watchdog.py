"""What is killed leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from probe_groups import wait_until

from workers import watchdog
from workers.watchdog import kill_marked, pids_marked

WITH_SHARED_MEMORY = """
import time
from multiprocessing.shared_memory import SharedMemory
print(SharedMemory(create=True, size=4096).name, flush=True)
time.sleep(600)
"""


def test_shared_memory_of_a_killed_process_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    """By Python's own tracker, a child that ends last: samplers share memory with their workers so."""
    monkeypatch.setattr(watchdog, "_CLEANING_S", 60.0)
    mark = f"RLCTL_TEST_MARK={os.getpid()}"
    name, _, value = mark.partition("=")
    process = subprocess.Popen(
        [sys.executable, "-c", WITH_SHARED_MEMORY],
        env={**os.environ, name: value},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    segment = Path("/dev/shm", process.stdout.readline().strip())
    assert segment.exists()
    # It is started without waiting for it.
    assert wait_until(lambda: any(is_tracker(pid) for pid in pids_marked(mark)))
    assert kill_marked(mark, 90) == []
    assert process.wait() == -9
    process.stdout.close()
    assert not segment.exists()
    assert pids_marked(mark) == []


def test_a_process_is_waited_for_until_it_has_let_go_of_its_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """It loses its environment first. Here it does so at its kill, which takes effect later."""
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    process = subprocess.Popen(["sleep", "600"], env={**os.environ, "RLCTL_TEST_MARK": mark})
    killed: list[threading.Timer] = []

    def kill_later(pid: int, number: signal.Signals) -> None:
        assert (pid, number) == (process.pid, signal.SIGKILL)
        killed.append(threading.Timer(0.3, process.kill))
        killed[-1].start()

    seen = watchdog._environ_of
    monkeypatch.setattr(watchdog, "signal_process", kill_later)
    monkeypatch.setattr(watchdog, "_environ_of", lambda pid: b"" if killed and pid == process.pid else seen(pid))
    try:
        while mark.encode() not in seen(process.pid):
            time.sleep(0.01)
        assert kill_marked(f"RLCTL_TEST_MARK={mark}", 60) == []
        assert process.poll() == -9
        assert len(killed) == 1
    finally:
        process.kill()
        process.wait()


def is_tracker(pid: int) -> bool:
    return b"resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
