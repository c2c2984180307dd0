"""`rlctl setup-engine`: the script that adds an engine, run from wherever rlctl is installed."""

from __future__ import annotations

import os
import shutil
import sys
from typing import NoReturn

from specs.errors import UsageError
from specs.packages import setup_script
from specs.text import show


def setup_engine(name: str) -> NoReturn:
    """Replace this process by the script. Raises UsageError where there is no bash, and for what cannot be a name."""
    if not name.isascii() or not name.isalpha():
        raise UsageError(f"no engine is called {show(name)}", hint="it adds deepspeed, megatron or vllm")
    bash = shutil.which("bash")
    if bash is None:
        raise UsageError("setup-engine needs bash, and PATH leads to none", hint="install it, and call this again")
    os.execve(bash, [bash, str(setup_script()), name], {**os.environ, "RLCTL_INTERPRETER": sys.executable})
