"""The run directory: one run at a time, attempts are numbered, nothing is overwritten.

For `check-config` it also says what lies where a run would write.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from rlctl.models.as_built_check import read_starting_weights
from rlctl.run.checkpoints import step_path, steps_in
from rlctl.run.input_files import Inputs, changes, inputs_of, parsed, size_of, told_progress
from rlctl.run.resume import differences
from rlctl.show.journal import FILE as JOURNAL
from rlctl.show.journal import Journal
from specs.errors import Problem, RlctlError, RoleFailure, RunDirError
from specs.json_file import read_object, write_object
from specs.load.as_run import as_run
from specs.schema.spec import Spec

START_ANEW = "train with --run-dir or another run.name to start anew"
ASIDE = "before_attempt_"
_FULL = (errno.ENOSPC, errno.EDQUOT)
_OF_A_DISK = (*_FULL, errno.EROFS, errno.EIO, errno.ESTALE)  # an error in a write does not say in which file


class RunDir:
    """Paths of a run, and the lock that keeps a second `train` out."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.attempt = 0
        self.changes: list[str] = []  # of the spec since the first attempt, as `key: old → new`
        self.inputs: Inputs = {}  # what the run reads, as it is now
        self.accepted: list[str] = []  # what of it is not as it was in the attempt before
        self.notes: list[str] = []  # what a person should know of this directory
        self.spec_dir = Path()
        self.overrides: Sequence[str] = ()  # of the spec, as the attempt was started with it
        self.journal = Journal(self.path, 0)
        self._suffix = ""  # of the files that an attempt leaves, between name and ending
        self.starting_weights: Mapping[str, str] = {}  # role → checksum, as the first attempt built them
        self._lock: IO[str] | None = None

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def samples(self) -> Path:
        return self.path / "samples.jsonl"

    @property
    def evaluations(self) -> Path:
        return self.path / "eval.jsonl"

    @property
    def as_built(self) -> Path:
        return self.path / "as_built.json"

    @property
    def resolved(self) -> Path:
        return self.path / "resolved.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        return self.path / "logs" / f"attempt_{self.attempt}"

    def open(
        self,
        spec: Spec,
        spec_path: Path,
        *,
        resume: bool,
        accept_changed_files: bool = False,
        force: bool = False,
        spec_dir: Path | None = None,
        overrides: Sequence[str] = (),
    ) -> None:
        """Make (or find again) the directory and lock it. `accept_changed_files`: a resume goes on though files that
        the run reads are not what they were. `force`: a run that saved no checkpoint is set aside, and another begins.
        `spec_dir`: where relative paths start, when that is not the spec file's folder. Raises RunDirError; then
        nothing was changed."""
        self.spec_dir, self.overrides = spec_dir or spec_path.absolute().parent, tuple(overrides)
        try:
            with told_as_disk_errors(self.path):
                self._open(spec, spec_path, resume=resume, accept_changed_files=accept_changed_files, force=force)
        except BaseException:
            self.release()
            raise

    def _open(self, spec: Spec, spec_path: Path, *, resume: bool, accept_changed_files: bool, force: bool) -> None:
        begun = self.resolved.is_file()
        if self.path.exists() and not self.path.is_dir():
            raise RunDirError(f"{self.path} is a file", hint="pass another folder with --run-dir")
        if not begun and self._holds_steps():
            raise RunDirError(
                f"{self.resolved}, which says what this run was started with, is not there",
                hint=f"put it back from a copy; {START_ANEW}",
            )
        if resume and not begun:
            raise RunDirError(f"{self.path} holds no run to resume", hint="leave out --resume to start one there")
        if begun:
            self._take_lock()  # in use is the more helpful message: say that first
        holds_run = begun and self._holds_steps()
        if holds_run and not resume:
            if not force or steps_in(self.checkpoints):
                raise self._already_there()
            self._set_aside()
            begun = holds_run = False
        if not begun and self.path.is_dir() and any(not _outlives(p.name) for p in self.path.iterdir()):
            raise RunDirError(f"{self.path} is not empty and holds no run", hint="choose another folder with --run-dir")
        if holds_run:
            self._same_run(spec)
        self._read_inputs(spec, self.spec_dir)
        if holds_run:
            self._same_inputs(accept_changed_files)
            self.starting_weights = read_starting_weights(self.as_built)
        elif begun:  # it ended before its first step: begin again, keeping the logs
            self.as_built.unlink(missing_ok=True)
            self.resolved.unlink()
            for record in self.path.glob("inputs.*json"):
                record.unlink()
        self.path.mkdir(parents=True, exist_ok=True)
        if self._lock is None:
            self._take_lock()
        self._begin_attempt(spec, spec_path)

    def _holds_steps(self) -> bool:
        """Whether a run made steps here. Raises RunDirError where something else stands in a file's place."""
        for file in (self.metrics, self.samples, self.path / JOURNAL):
            _check_is_file(file)
        metrics = self.metrics.is_file() and self.metrics.stat().st_size > 0
        return metrics or bool(steps_in(self.checkpoints))

    def _already_there(self) -> RunDirError:
        saved = _newest_checkpoint(self.checkpoints)
        anew = "" if saved else ", with --force to set it aside and start anew (it has saved no checkpoint)"
        return RunDirError(
            f"{self.path} already holds a run" + (f", saved at step {saved}" if saved else ""),
            hint=f"add --resume to go on with it{anew}, or choose another folder with --run-dir or another run.name",
        )

    def _set_aside(self) -> None:
        """What a run without a checkpoint left moves to a folder of its own, but for its logs and the journal."""
        aside = self.path / f"{ASIDE}{self._next_attempt()}"
        aside.mkdir()
        for path in self.path.iterdir():
            if not _outlives(path.name):
                path.rename(aside / path.name)
        self.notes.append(f"what the run before left is in {aside}")

    def _next_attempt(self) -> int:
        names = (re.fullmatch(r"attempt_(\d+)", path.name) for path in (self.path / "logs").glob("attempt_*"))
        return max((int(name[1]) for name in names if name), default=0) + 1

    def _take_lock(self) -> None:
        path = self.path / ".lock"
        _check_is_file(path)
        lock = open(path, "a+", errors="replace")  # noqa: SIM115 - held for the life of the run
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):  # not held: a file system without locks
                lock.close()
                raise OSError(error.errno, error.strerror, str(path)) from None
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
        try:
            before = read_object(self.resolved)
        except ValueError as error:
            hint = f"put it back from a copy; {START_ANEW}"
            raise RunDirError(
                f"{self.resolved}, which says what this run was started with, {error}", hint=hint
            ) from None
        refused, _ = differences(before, spec.resolved(), spec.actor.engine)
        self.changes = self._changes_since_last_attempt(before, spec)
        if refused:
            raise RunDirError(
                "the spec differs from the one this run was started with, in what may not change:\n"
                + "\n".join(f"  - {line}" for line in refused),
                hint=f"put these back as in {self.path / 'spec.toml'}, or start a new run with --run-dir",
            )

    def _changes_since_last_attempt(self, first: dict[str, Any], spec: Spec) -> list[str]:
        """What was changed at an earlier resume was told then."""
        try:
            before = read_object(self._newest("resolved"))
        except ValueError:
            before = first
        return differences(before, spec.resolved())[1]

    def _newest(self, name: str) -> Path:
        """What the last attempt wrote as `name`.json or `name`.attempt_N.json."""
        found = {path: re.fullmatch(rf"{name}\.attempt_(\d+)\.json", path.name) for path in self.path.glob(f"{name}.*")}
        later = {int(match[1]): path for path, match in found.items() if match}
        return later[max(later)] if later else self.path / f"{name}.json"

    def _read_inputs(self, spec: Spec, spec_dir: Path) -> None:
        with told_progress(size_of(spec, spec_dir)) as seen:
            self.inputs = inputs_of(spec, spec_dir, seen)

    def _same_inputs(self, accept: bool) -> None:
        """Against the attempt before: what it was resumed with, or what the run was started with."""
        record = self._newest("inputs")
        if not record.exists():
            self.notes.append("not known whether data and reward files changed: this run did not record them so far")
            return
        try:
            self.accepted = changes(parsed(read_object(record)), self.inputs)
        except ValueError as error:
            hint = f"put it back from a copy, or remove it: then this resume cannot tell; {START_ANEW}"
            raise RunDirError(f"{record}, which says what this run reads, {error}", hint=hint) from None
        if self.accepted and not accept:
            raise RunDirError(
                "files that this run reads are not what they were:\n"
                + "\n".join(f"  - {line}" for line in self.accepted),
                hint="put them back, start a new run with --run-dir, or add --accept-changed-files to go on with them "
                "as they are, which the run directory records",
            )

    def add_downloaded(self, spec: Spec, spec_dir: Path) -> None:
        """Record what was not on this host yet when the attempt began."""
        found = inputs_of(spec, spec_dir, known=self.inputs)
        if found != self.inputs:
            self.inputs = found
            self._record_inputs()

    def _record_inputs(self) -> None:
        record = {"attempt": self.attempt, "files": self.inputs, "accepted": self.accepted}
        write_object(self.path / f"inputs{self._suffix}.json", record)

    def _begin_attempt(self, spec: Spec, spec_path: Path) -> None:
        self.attempt = self._next_attempt()
        self.logs.mkdir(parents=True)
        name = f".attempt_{self.attempt}" if self.resolved.exists() else ""
        copy = self.path / f"spec{name}.toml"
        copy.write_text(as_run(spec_path.read_text(encoding="utf-8"), self.overrides), encoding="utf-8")
        write_object(self.path / f"resolved{name}.json", spec.resolved())
        self._suffix = name
        self._record_inputs()
        self.checkpoints.mkdir(exist_ok=True)
        self.journal = Journal(self.path, self.attempt)
        where = {"spec": str(spec_path.absolute()), "spec_dir": str(self.spec_dir), "copy": copy.name}
        self.journal.add("start", **where, overrides=list(self.overrides), pid=os.getpid(), host=socket.gethostname())

    def release(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def _outlives(name: str) -> bool:
    """Whether a file of a run directory stays there when a run that was set aside moves."""
    return name in (".lock", "logs", JOURNAL) or name.startswith(ASIDE)


def _check_is_file(path: Path) -> None:
    if os.path.lexists(path) and not path.is_file():  # opening a pipe would wait
        hint = f"move it away, or put the run's own back; {START_ANEW}"
        raise RunDirError(f"{path} is not a file", hint=hint)


@contextmanager
def told_as_disk_errors(run_dir: Path) -> Iterator[None]:
    """What a disk or a file system refuses below `run_dir` is told as such, with the file; and so is what a role fails
    of when the directory is gone."""
    try:
        yield
    except RoleFailure:
        if run_dir.is_dir():
            raise
        raise _gone(run_dir) from None
    except OSError as error:
        file = str(error.filename or "")
        if not file.startswith(str(run_dir)) and error.errno not in _OF_A_DISK:
            raise
        raise _disk_error(run_dir, file, error) from None


def _gone(run_dir: Path) -> RlctlError:
    hint = "put it back and run the same command with --resume; if it was moved, name its new place with --run-dir"
    return RlctlError(f"the run directory {run_dir} is gone: it was moved or removed", hint=hint)


def _disk_error(run_dir: Path, file: str, error: OSError) -> RlctlError:
    if error.errno in _FULL:
        hint = "nothing older was lost: free some space, then run the same command with --resume"
        return RlctlError(f"the disk of {run_dir} is full: {error}", hint=hint)
    if error.errno == errno.ENOENT and not run_dir.is_dir():
        return _gone(run_dir)
    hint = f"move away what stands there, or have the folder writable, and run the same command again; {START_ANEW}"
    return RunDirError(f"{file or run_dir} cannot be used: {error.strerror or error}", hint=hint)


# ── as seen by check-config ───────────────────────────────────────────────────────────────────────


def run_dir_warnings(spec: Spec) -> list[Problem]:
    """At most one warning, about the folder `run.dir/run.name`, as seen from here. Nothing is taken, made or
    changed."""
    run = RunDir(spec.run.place)
    value = f'"{spec.run.name}"'
    try:
        return _found_there(run, spec, value)
    except OSError as error:
        return [
            Problem("run.name", f"{error.filename or run.path} cannot be read: {error.strerror}", START_ANEW, value)
        ]


def _found_there(run: RunDir, spec: Spec, value: str) -> list[Problem]:
    if run.path.is_file():
        return [Problem("run.name", f"{run.path} is a file", "remove it, or use another run.name", value)]
    if not run.path.is_dir() or not any(entry.name != ".lock" for entry in run.path.iterdir()):
        return []
    if owner := _owner(run.path / ".lock"):
        message = f"the run directory {run.path} is in use by another rlctl (process {owner})"
        return [Problem("run.name", message, "wait for it or stop it; " + START_ANEW, value)]
    message = f"the run directory {run.path} is not empty"
    if not run.resolved.is_file():
        return [Problem("run.name", f"{message} and holds no run", START_ANEW, value)]
    newest = _newest_checkpoint(run.checkpoints)
    has = f"its newest checkpoint is of step {newest} of {spec.run.steps}" if newest else "it has no checkpoint yet"
    return [Problem("run.name", f"{message}: {has}", f"train with --resume to go on, {START_ANEW[6:]}", value)]


def _owner(lock: Path) -> str:
    """Process that holds the run's lock, or ""."""
    if not lock.is_file():  # opening a pipe would wait
        return ""
    try:
        with lock.open(errors="replace") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return file.read().strip() or "unknown"
    except OSError:
        pass
    return ""


def is_running(run_dir: Path) -> bool:
    """Whether an attempt of the run goes on, as far as this host can tell."""
    return bool(_owner(run_dir / ".lock"))


def _newest_checkpoint(folder: Path) -> int:
    """Step of the newest checkpoint with a manifest; `train` finds out whether it is whole. 0: there is none."""
    steps = (step for step in steps_in(folder) if (step_path(folder, step) / "manifest.json").is_file())
    return max(steps, default=0)
