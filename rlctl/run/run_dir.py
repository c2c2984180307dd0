"""The run directory: one run at a time, attempts are numbered, nothing is overwritten.

For `check-config` it also says what lies where a run would write.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from pathlib import Path
from typing import IO

from rlctl.run.checkpoints import step_path
from rlctl.run.resume import differences
from specs.errors import Problem, RunDirError
from specs.schema.spec import Spec

START_ANEW = "train with --run-dir or another run.name to start anew"


class RunDir:
    """Paths of a run, and the lock that keeps a second `train` out."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.attempt = 0
        self.changes: list[str] = []  # of the spec since the first attempt, as `key: old → new`
        self._lock: IO[str] | None = None

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def samples(self) -> Path:
        return self.path / "samples.jsonl"

    @property
    def as_built(self) -> Path:
        return self.path / "as_built.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        return self.path / "logs" / f"attempt_{self.attempt}"

    def open(self, spec: Spec, spec_path: Path, *, resume: bool) -> None:
        """Make (or find again) the directory and lock it. Raises RunDirError; then nothing was changed."""
        begun = (self.path / "resolved.json").is_file()
        holds_run = begun and self.metrics.is_file() and self.metrics.stat().st_size > 0
        if self.path.exists() and not self.path.is_dir():
            raise RunDirError(f"{self.path} is a file", hint="pass another folder with --run-dir")
        if resume and not begun:
            raise RunDirError(f"{self.path} holds no run to resume", hint="leave out --resume to start one there")
        if begun:
            self._take_lock()  # in use is the more helpful message: say that first
        if holds_run and not resume:
            self.release()
            raise RunDirError(
                f"{self.path} already holds a run",
                hint="add --resume to go on with it, or choose another folder with --run-dir or another run.name",
            )
        if not begun and self.path.is_dir() and any(p.name != ".lock" for p in self.path.iterdir()):
            raise RunDirError(f"{self.path} is not empty and holds no run", hint="choose another folder with --run-dir")
        if resume and holds_run:
            try:
                self._same_run(spec)
            except RunDirError:
                self.release()
                raise
        if begun and not holds_run:  # it ended before its first step: begin again, keeping the logs
            self.as_built.unlink(missing_ok=True)
            (self.path / "resolved.json").unlink()
        self.path.mkdir(parents=True, exist_ok=True)
        if self._lock is None:
            self._take_lock()
        self._begin_attempt(spec, spec_path)

    def _take_lock(self) -> None:
        lock = open(self.path / ".lock", "a+")  # noqa: SIM115 - held for the life of the run
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.seek(0)
            owner = lock.read().strip()
            lock.close()
            raise RunDirError(
                f"{self.path} is in use by another rlctl" + (f" (process {owner})" if owner else ""),
                hint="wait for it, stop it, or choose another folder with --run-dir",
            ) from None
        lock.seek(0)
        lock.truncate()
        lock.write(str(os.getpid()))
        lock.flush()
        self._lock = lock

    def _same_run(self, spec: Spec) -> None:
        before = json.loads((self.path / "resolved.json").read_text())
        refused, self.changes = differences(before, spec.resolved(), spec.actor.engine)
        if refused:
            raise RunDirError(
                "the spec differs from the one this run was started with, in what may not change:\n"
                + "\n".join(f"  - {line}" for line in refused),
                hint=f"put these back as in {self.path / 'spec.toml'}, or start a new run with --run-dir",
            )

    def _begin_attempt(self, spec: Spec, spec_path: Path) -> None:
        done = [int(p.name.removeprefix("attempt_")) for p in (self.path / "logs").glob("attempt_*")]
        self.attempt = max(done, default=0) + 1
        self.logs.mkdir(parents=True)
        name = f".attempt_{self.attempt}" if (self.path / "resolved.json").exists() else ""
        shutil.copyfile(spec_path, self.path / f"spec{name}.toml")
        (self.path / f"resolved{name}.json").write_text(json.dumps(spec.resolved(), indent=2) + "\n")
        self.checkpoints.mkdir(exist_ok=True)

    def release(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None


# ── as seen by check-config ───────────────────────────────────────────────────────────────────────


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
