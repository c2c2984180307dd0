"""Scripts in a clone: which environment is used, which interpreter makes it, and which folders a quickstart takes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

MADE = 'set -euo pipefail; . <(sed "/^ensure_env$/,\\$d" scripts/_env.sh); fingerprint >"$STAMP"'
RLCTL = """#!/bin/sh
echo "$@" >>calls
case "$*" in init*) : >"$2" ;; *--dry-run*) ;; train*) sleep 1; mkdir -p "$4"; : >"$4/metrics.jsonl" ;; esac
"""
USED = "set -euo pipefail; . scripts/_env.sh; printf %s used"


def bash(folder: Path, script: str, python: str = "/nowhere") -> subprocess.CompletedProcess[str]:
    """Run it where this interpreter makes environments."""
    environment = {**os.environ, "RLCTL_PYTHON": python}
    return subprocess.run(
        ["bash", "-c", script], cwd=folder, env=environment, capture_output=True, text=True, timeout=60
    )


def with_environment(repo_root: Path, clone: Path) -> None:
    """Make a clone whose environment is up to date."""
    shutil.copytree(repo_root / "scripts", clone / "scripts")
    shutil.copy(repo_root / "pyproject.toml", clone)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", ".venv"], cwd=clone, check=True, timeout=60)
    made = bash(clone, MADE)
    assert made.returncode == 0, made.stderr


def test_an_environment_is_used_where_it_was_made_and_made_anew_in_a_copy(repo_root: Path, tmp_path: Path) -> None:
    clone, copied, linked = (tmp_path / name for name in ("a clone", "copied", "linked"))
    with_environment(repo_root, clone)
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


def test_quickstarts_at_once_have_a_folder_each_and_a_dry_run_leaves_none(repo_root: Path, tmp_path: Path) -> None:
    with_environment(repo_root, tmp_path)
    (tmp_path / "scripts" / "_quickstart_summary.py").write_text("")
    (tmp_path / ".venv" / "bin" / "rlctl").write_text(RLCTL)
    (tmp_path / ".venv" / "bin" / "rlctl").chmod(0o755)

    both = [subprocess.Popen(["scripts/quickstart"], cwd=tmp_path) for _ in range(2)]
    assert [one.wait(timeout=60) for one in both] == [0, 0]
    exported = [line for line in (tmp_path / "calls").read_text().splitlines() if line.startswith("export")]
    assert sorted(exported) == [f"export-checkpoint runs/quickstart-{n} exports/quickstart-{n}" for n in (1, 2)]

    dry = bash(tmp_path, "scripts/quickstart --dry-run")
    assert dry.returncode == 0, dry.stderr
    last = (tmp_path / "calls").read_text().splitlines()[-1]
    assert last == "train runs/quickstart.toml --run-dir runs/quickstart-3 --dry-run"
    assert not (tmp_path / "runs" / "quickstart-3").exists()


def test_the_checks_leave_no_temporary_files_behind(repo_root: Path, tmp_path: Path) -> None:
    clone, temporary = tmp_path / "clone", tmp_path / "temporary"
    with_environment(repo_root, clone)
    temporary.mkdir()
    (clone / "named.py").write_text("")
    for name in ("ray", "agents", "minisweagent", "pydantic_ai", "material"):
        next(clone.glob(".venv/lib/python*/site-packages")).joinpath(f"{name}.py").write_text("")
    for name in ("ruff", "mypy", "lint-imports", "mkdocs"):
        (clone / ".venv" / "bin" / name).write_text("#!/bin/sh\n")
        (clone / ".venv" / "bin" / name).chmod(0o755)
    done = bash(clone, f"TMPDIR='{temporary}' scripts/test named.py")
    assert "✓ site of the docs" in done.stdout
    assert [*temporary.iterdir()] == []
