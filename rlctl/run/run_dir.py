"""Open a run directory: one run at a time, attempts are numbered, nothing is overwritten."""

from __future__ import annotations

import errno
import os
import re
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from rlctl.models.as_built_check import read_starting_weights
from rlctl.run.checkpoints import step_path, steps_in
from rlctl.run.input_files import Inputs, changes, inputs_of, parsed, size_of
from rlctl.run.lineage import FORKED_FROM
from rlctl.run.resume import differences
from rlctl.run.run_lock import LOCK, RunLock, owner_of
from rlctl.show.journal import FILE as JOURNAL
from rlctl.show.journal import Journal, newest
from specs.errors import Problem, RlctlError, RoleFailure, RunDirError
from specs.json_file import read_object, write_object
from specs.load.overrides import as_run
from specs.schema.spec import Spec

START_ANEW = "train with --run-dir or another run.name to start over"
ASIDE = "before_attempt_"
SLOW_BYTES = 5e9  # to hash takes more than a second
_FULL = (errno.ENOSPC, errno.EDQUOT)
_DISK_ERRORS = (*_FULL, errno.EROFS, errno.EIO, errno.ESTALE)  # an error in a write does not say in which file


class RunDir:
    """Hold the paths of a run and its lock; once it is open, its spec and where relative paths in that start."""

    spec: Spec

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.ref_logprobs = self.path / "ref_logprobs.safetensors"
        self.metrics, self.samples = self.path / "metrics.jsonl", self.path / "samples.jsonl"
        self.evaluations, self.as_built = self.path / "eval.jsonl", self.path / "as_built.json"
        self.resolved, self.checkpoints = self.path / "resolved.json", self.path / "checkpoints"
        self.attempt = 0
        self.changes: list[str] = []  # to the spec since the last attempt, as `key: old → new`
        self.inputs: Inputs = {}  # what the run reads, as it is now
        self.accepted: list[str] = []  # changes to it since the last attempt
        self.notes: list[str] = []  # what a person should know of this directory
        self.spec_dir = Path()
        self.overrides: Sequence[str] = ()  # of the spec, as the attempt was started with it
        self.journal = Journal(self.path, 0)
        self._suffix = ""  # of the files that an attempt leaves, between name and ending
        self.starting_weights: Mapping[str, str] = {}  # role → checksum, as the first attempt built them
        self._lock: RunLock | None = None

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
        self.spec, self.spec_dir, self.overrides = spec, spec_dir or spec_path.absolute().parent, tuple(overrides)
        try:
            with explained_disk_errors(self.path):
                self._open(spec, spec_path, resume=resume, accept_changed_files=accept_changed_files, force=force)
        except BaseException:
            self.release()
            raise

    def _open(self, spec: Spec, spec_path: Path, *, resume: bool, accept_changed_files: bool, force: bool) -> None:
        begun = self.resolved.is_file()
        if self.path.exists() and not self.path.is_dir():
            raise RunDirError(f"{self.path} is a file", hint="pass another folder with --run-dir")
        if not begun and self._holds_steps():
            raise self._lost(self.resolved, "was started with", "is not there")
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
        if not begun and self.path.is_dir() and any(not _outlives(path.name) for path in self.path.iterdir()):
            raise RunDirError(f"{self.path} is not empty and holds no run", hint="choose another folder with --run-dir")
        if holds_run:
            self._check_same_run(spec)
        if (size := size_of(spec, self.spec_dir)) > SLOW_BYTES:
            print(f"hashing {size / 1e9:.0f} GB of data and reward files …", file=sys.stderr, flush=True)
        self.inputs = inputs_of(spec, self.spec_dir)
        if holds_run:
            self._check_same_inputs(accept_changed_files)
            self.starting_weights = read_starting_weights(self.as_built)
        elif begun:  # it ended before its first step: begin again, keeping the logs
            fork = () if resume else (self.path / FORKED_FROM,)
            for file in (self.as_built, self.resolved, *self.path.glob("inputs.*json"), *fork):
                file.unlink(missing_ok=True)
        self.path.mkdir(parents=True, exist_ok=True)
        if self._lock is None:
            self._take_lock()
        self._begin_attempt(spec, spec_path)

    def _holds_steps(self) -> bool:
        """Tell whether a run made steps here. Raises RunDirError where something else stands in a file's place."""
        for file in (self.metrics, self.samples, self.path / JOURNAL):
            _check_is_file(file)
        metrics = self.metrics.is_file() and self.metrics.stat().st_size > 0
        return metrics or bool(steps_in(self.checkpoints))

    def _already_there(self) -> RunDirError:
        saved = _newest_checkpoint(self.checkpoints)
        anew = "" if saved else ", with --force to set it aside and start over (it has saved no checkpoint)"
        return RunDirError(
            f"{self.path} already holds a run" + (f", saved at step {saved}" if saved else ""),
            hint=f"add --resume to continue it{anew}, or choose another folder with --run-dir or another run.name",
        )

    def _lost(self, file: Path, what: str, problem: object, hint: str = "put it back from a copy") -> RunDirError:
        return RunDirError(f"{file}, which says what this run {what}, {problem}", hint=f"{hint}; {START_ANEW}")

    def _set_aside(self) -> None:
        """Move what a run without a checkpoint left to a folder of its own, but for its logs and the journal."""
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
        _check_is_file(self.path / LOCK)
        self._lock = RunLock(self.path, "wait for it, stop it, or choose another folder with --run-dir")

    def _check_same_run(self, spec: Spec) -> None:
        """Refuse changes to what the first attempt began with; keep the others since the last one for a person."""
        try:
            first = read_object(self.resolved)
        except ValueError as error:
            raise self._lost(self.resolved, "was started with", error) from None
        refused, _ = differences(first, spec.resolved(), spec.lead_engine)
        try:
            last = read_object(newest(self.path, "resolved"))
        except ValueError:
            last = first
        self.changes = differences(last, spec.resolved())[1]
        if refused:
            raise RunDirError(
                "the spec differs from the one this run was started with, in what may not change:" + _listed(refused),
                hint=f"put these back as in {self.path / 'spec.toml'}, or start a new run with --run-dir",
            )

    def _check_same_inputs(self, accept: bool) -> None:
        """Compare with the attempt before: what it was resumed with, or what the run was started with."""
        record = newest(self.path, "inputs")
        if not record.exists():
            self.notes.append("not known whether data and reward files changed: this run did not record them so far")
            return
        try:
            self.accepted = changes(parsed(read_object(record)), self.inputs)
        except ValueError as error:
            hint = "put it back from a copy, or remove it: then this resume cannot tell"
            raise self._lost(record, "reads", error, hint) from None
        if self.accepted and not accept:
            raise RunDirError(
                "files that this run reads are not what they were:" + _listed(self.accepted),
                hint="put them back, start a new run with --run-dir, or add --accept-changed-files to continue with "
                "them as they are, which the run directory records",
            )

    def add_downloaded(self) -> None:
        """Record what was not on this host yet when the attempt began."""
        found = inputs_of(self.spec, self.spec_dir, known=self.inputs)
        if found != self.inputs:
            self.inputs = found
            self._record_inputs()

    def _record_inputs(self) -> None:
        record = {"attempt": self.attempt, "files": self.inputs, "accepted": self.accepted}
        write_object(self.path / f"inputs{self._suffix}.json", record)

    def _begin_attempt(self, spec: Spec, spec_path: Path) -> None:
        self.attempt = self._next_attempt()
        self.logs.mkdir(parents=True)
        self._suffix = f".attempt_{self.attempt}" if self.resolved.exists() else ""
        copy = self.path / f"spec{self._suffix}.toml"
        copy.write_text(as_run(spec_path.read_text(encoding="utf-8"), self.overrides), encoding="utf-8")
        write_object(self.path / f"resolved{self._suffix}.json", spec.resolved())
        self._record_inputs()
        self.checkpoints.mkdir(exist_ok=True)
        self.journal = Journal(self.path, self.attempt)
        where = {"spec": str(spec_path.absolute()), "spec_dir": str(self.spec_dir), "copy": copy.name}
        self.journal.add("start", **where, overrides=list(self.overrides), pid=os.getpid(), host=socket.gethostname())

    def release(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None


def _outlives(name: str) -> bool:
    """Tell whether a file of a run directory stays there when a run is set aside."""
    return name in (LOCK, "logs", JOURNAL) or name.startswith(ASIDE)


def _check_is_file(path: Path) -> None:
    if os.path.lexists(path) and not path.is_file():  # opening a pipe would wait
        hint = f"move it away, or put the run's own back; {START_ANEW}"
        raise RunDirError(f"{path} is not a file", hint=hint)


def _listed(lines: Sequence[str]) -> str:
    return "".join(f"\n  - {line}" for line in lines)


@contextmanager
def explained_disk_errors(run_dir: Path) -> Iterator[None]:
    """Explain what a disk or a file system refuses below `run_dir`, with the file; and what a role fails of when the
    directory is gone."""
    try:
        yield
    except RlctlError as error:
        if run_dir.is_dir() or not isinstance(error, RoleFailure):
            raise
        raise _gone(run_dir) from None
    except OSError as error:
        file = str(error.filename or "")
        if not file.startswith(str(run_dir)) and error.errno not in _DISK_ERRORS:
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
    """Return at most one warning about the folder `run.dir/run.name`, as seen from here. Nothing is changed."""
    run = RunDir(spec.run.place)
    try:
        message, hint = _found_there(run, spec)
    except OSError as error:
        message, hint = f"{error.filename or run.path} cannot be read: {error.strerror}", START_ANEW
    return [Problem("run.name", message, hint, f'"{spec.run.name}"')] if message else []


def _found_there(run: RunDir, spec: Spec) -> tuple[str, str]:
    if run.path.is_file():
        return f"{run.path} is a file", "remove it, or use another run.name"
    if not run.path.is_dir() or not any(entry.name != LOCK for entry in run.path.iterdir()):
        return "", ""
    if owner := owner_of(run.path):
        return f"the run directory {run.path} is in use by {owner}", f"wait for it or stop it; {START_ANEW}"
    message = f"the run directory {run.path} is not empty"
    if not run.resolved.is_file():
        return f"{message} and holds no run", START_ANEW
    saved = _newest_checkpoint(run.checkpoints)
    has = f"its newest checkpoint is of step {saved} of {spec.run.steps}" if saved else "it has no checkpoint yet"
    return f"{message}: {has}", f"train with --resume to continue, {START_ANEW[6:]}"


def _newest_checkpoint(folder: Path) -> int:
    """Return the step of the newest checkpoint with a manifest, 0 for none; `train` finds out whether it is whole."""
    steps = (step for step in steps_in(folder) if (step_path(folder, step) / "manifest.json").is_file())
    return max(steps, default=0)
