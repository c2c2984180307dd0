"""Entry point of the child process: exits with the role, and becomes SGLang's server by exec.

python -m backends.sglang_rollout.server_process ROLE_PID -- --model-path … --port …
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> int:
    role_pid, dashes, *server_args = argv
    assert dashes == "--", argv
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # stays in effect after the exec below
    if os.getppid() != int(role_pid):
        return 1  # the role ended before the call above
    os.execv(sys.executable, [sys.executable, "-m", "sglang.launch_server", *server_args])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
