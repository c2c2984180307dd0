"""What lies where a run would write: nothing, a run that can be resumed, one that is going on, or something else."""

from __future__ import annotations

import fcntl
import re
from pathlib import Path

from rlctl.checkpoints import step_path
from rlctl.run_dir import RunDir
from specs.errors import Problem
from specs.schema import Spec

START_ANEW = "train with --run-dir or another run.name to start anew"


def run_dir_warnings(spec: Spec) -> list[Problem]:
    """At most one: about the folder `run.dir/run.name`, as seen from here. Nothing is taken, made or changed."""
    run = RunDir(Path(spec.run.dir) / spec.run.name)
    value = f'"{spec.run.name}"'
    if run.path.is_file():
        return [Problem("run.name", f"{run.path} is a file", "remove it, or use another run.name", value)]
    if not run.path.is_dir() or not any(entry.name != ".lock" for entry in run.path.iterdir()):
        return []
    if owner := _owner(run.path / ".lock"):
        message = f"the run directory {run.path} is in use by another rlctl (process {owner})"
        return [Problem("run.name", message, "wait for it or stop it; " + START_ANEW, value)]
    message = f"the run directory {run.path} is not empty"
    if not (run.path / "resolved.json").is_file():
        return [Problem("run.name", f"{message} and holds no run", START_ANEW, value)]
    newest = _newest_checkpoint(run.checkpoints)
    has = f"its newest checkpoint is of step {newest} of {spec.run.steps}" if newest else "it has no checkpoint yet"
    return [Problem("run.name", f"{message}: {has}", f"train with --resume to go on, {START_ANEW[6:]}", value)]


def _owner(lock: Path) -> str:
    """Process that holds the run's lock, or ""."""
    try:
        with lock.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return file.read().strip() or "unknown"
    except OSError:
        pass
    return ""


def _newest_checkpoint(folder: Path) -> int:
    """By its manifest's being there: whether it is whole, `train` finds out. 0: there is none."""
    names = (re.fullmatch(r"step_(\d+)", entry.name) for entry in folder.glob("step_*"))
    steps = (int(name[1]) for name in names if name)
    return max((step for step in steps if (step_path(folder, step) / "manifest.json").is_file()), default=0)
