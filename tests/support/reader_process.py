"""A rollout's end of a transport in a process of its own, that tests can kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path


class ReaderProcess:
    """`transport_reader.py`."""

    def __init__(self, env=None):
        command = [sys.executable, str(Path(__file__).with_name("transport_reader.py"))]
        path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
        env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **(env or {})}
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)

    def ask(self, told):
        print(json.dumps(told), file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())

    def end(self, number=signal.SIGKILL):
        self.process.send_signal(number)
        self.process.communicate(timeout=90)
