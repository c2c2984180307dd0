"""What another host says of itself before a run: `python -m rlctl.processes.remote_check ADDRESS PORT FOLDER…`, one
line of JSON.

Standard library only: a role's interpreter there need not have what the command line needs.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

from rlctl import __version__

MARK = "rlctl-probe: "
_DIAL_TIMEOUT_S = 5.0
_GPUS_TIMEOUT_S = 10.0


def main(address: str, port: int, folders: Sequence[str]) -> None:
    """Print version, the folders that are missing here, why the driver's address cannot be reached (or empty), how many
    GPUs there are (null: not known), and the time, in seconds since 1970."""
    missing = [folder for folder in folders if not os.path.isdir(folder)]
    found = {"version": __version__, "missing": missing, "dial": _dial(address, port), "gpus": _gpus()}
    print(MARK + json.dumps({**found, "time": time.time()}), flush=True)


def _gpus() -> int | None:
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=_GPUS_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines()) if listed.returncode == 0 else None


def _dial(address: str, port: int) -> str:
    try:
        socket.create_connection((address, port), timeout=_DIAL_TIMEOUT_S).close()
    except OSError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
