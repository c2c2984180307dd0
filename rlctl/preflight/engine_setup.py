"""`rlctl setup-engine`: the script that adds an engine, run from wherever rlctl is installed."""

from __future__ import annotations

import os
import shutil
import sys
from typing import NoReturn

from specs.errors import UsageError
from specs.packages import setup_script


def setup_engine(name: str) -> NoReturn:
    """Become that script, which says what it does and ends as it ends. Raises UsageError where there is no bash."""
    bash = shutil.which("bash")
    if bash is None:
        raise UsageError("setup-engine needs bash, and PATH leads to none", hint="install it, and call this again")
    os.execve(bash, [bash, str(setup_script()), name], {**os.environ, "RLCTL_INTERPRETER": sys.executable})
