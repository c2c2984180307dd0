"""`scripts/_env.sh` and `_steps.sh`: which environment is used, and which interpreter makes it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

MADE = 'set -euo pipefail; . <(sed "/^ensure_env$/,\\$d" scripts/_env.sh); fingerprint >"$STAMP"'
USED = "set -euo pipefail; . scripts/_env.sh; printf %s used"


def bash(folder: Path, script: str, python: str = "/nowhere") -> subprocess.CompletedProcess[str]:
    """Run it where this interpreter makes environments."""
    environment = {**os.environ, "RLCTL_PYTHON": python}
    return subprocess.run(
        ["bash", "-c", script], cwd=folder, env=environment, capture_output=True, text=True, timeout=60
    )


def test_an_environment_is_used_where_it_was_made_and_made_anew_in_a_copy(repo_root: Path, tmp_path: Path) -> None:
    clone, copied, linked = (tmp_path / name for name in ("a clone", "copied", "linked"))
    shutil.copytree(repo_root / "scripts", clone / "scripts")
    shutil.copy(repo_root / "pyproject.toml", clone)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", ".venv"], cwd=clone, check=True, timeout=60)
    made = bash(clone, MADE)
    assert made.returncode == 0, made.stderr
    assert bash(clone, USED).stdout == "used"

    linked.symlink_to(clone)
    assert bash(linked, USED).stdout == "used"

    shutil.copytree(clone, copied, symlinks=True)
    again = bash(copied, USED)
    assert again.stdout == ""
    assert "no Python 3.11 or newer found" in again.stderr


def test_the_path_of_the_interpreter_that_is_named_may_have_blanks(repo_root: Path, tmp_path: Path) -> None:
    named = tmp_path / "a python"
    named.symlink_to(sys.executable)
    assert bash(repo_root, ". scripts/_steps.sh; find_python", str(named)).stdout == f"{named}\n"
