"""The run directory: one run at a time, attempts are numbered, nothing is overwritten."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from pathlib import Path
from typing import IO

from rlctl.resume import differences
from specs.errors import RunDirError
from specs.schema import Spec


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
        refused, self.changes = differences(before, spec.resolved())
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
