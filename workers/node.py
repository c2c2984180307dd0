"""Keeps a launcher on its host for a driver that is on another one: `python -m workers.node COMMAND…`.

Standard input is connected to the driver and carries no data: when it closes (the driver ended or the connection
broke), every process that COMMAND started on this host is killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence

from workers.watchdog import kill_marked, set_process_name

GRACE_S = 3.0
_KILL_TIMEOUT_S = 10.0


def main(command: Sequence[str]) -> int:
    """Run `command` until it or standard input ends; returns its exit code, 128 + N after signal N."""
    set_process_name("rlctl-node")
    mark = f"RLCTL_PARENT_PID={os.getpid()}"  # ranks exit when this process ends, as with a driver on their host
    hung_up = threading.Event()
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, lambda *_: hung_up.set())
    child = subprocess.Popen(
        command,
        env={**os.environ, "RLCTL_PARENT_PID": str(os.getpid())},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    threading.Thread(target=_wait_for_end_of_input, args=(hung_up,), daemon=True).start()
    while child.poll() is None and not hung_up.wait(0.1):
        pass
    if child.poll() is None:
        _end(child)
    kill_marked(mark, _KILL_TIMEOUT_S)
    code = child.wait()
    return code if code >= 0 else 128 - code


def _wait_for_end_of_input(hung_up: threading.Event) -> None:
    while os.read(0, 4096):
        pass
    hung_up.set()


def _end(child: subprocess.Popen[bytes]) -> None:
    for number, grace_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, _KILL_TIMEOUT_S)):
        os.killpg(child.pid, number)
        try:
            child.wait(grace_s)
            return
        except subprocess.TimeoutExpired:
            continue


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
