"""Open a run directory: one run at a time, attempts are numbered, nothing is overwritten."""

from __future__ import annotations

import errno
import os
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from rlctl.models.as_built_check import read_starting_weights
from rlctl.run.checkpoints import START_OVER, step_path, steps_in
from rlctl.run.input_files import Inputs, Recorded, changes, inputs_of
from rlctl.run.lineage import FORKED_FROM, REF_LOGPROBS, Fork, read_own
from rlctl.run.resume import differences, with_new_keys
from rlctl.run.run_lock import LOCK, RunLock, owner_of
from rlctl.show.journal import Journal, newest
from specs.errors import Problem, RlctlError, RunDirError
from specs.json_file import write_object
from specs.load.overrides import as_run
from specs.schema.spec import Spec

FULL = (errno.ENOSPC, errno.EDQUOT)
# Left where a full disk or a kill ended its beginning.
_BEFORE_A_RUN = (LOCK, "logs", "resolved.json.partial", FORKED_FROM, f"{FORKED_FROM}.partial", REF_LOGPROBS)
_DISK_ERRORS = (*FULL, errno.EROFS, errno.EIO, errno.ESTALE)  # an error in a write does not say in which file


class RunDir:
    """Hold the paths of a run and its lock; once it is open, its spec and where relative paths in that start."""

    spec: Spec

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.ref_logprobs = self.path / REF_LOGPROBS
        self.metrics, self.samples = self.path / "metrics.jsonl", self.path / "samples.jsonl"
        self.evaluations, self.as_built = self.path / "eval.jsonl", self.path / "as_built.json"
        self.resolved, self.checkpoints = self.path / "resolved.json", self.path / "checkpoints"
        self.attempt = 0
        self.changes: list[str] = []  # to the spec since the last attempt, as `key: old → new`
        self.inputs: Inputs = {}  # what the run reads, as it is now
        self.accepted: list[str] = []  # changes to it since the last attempt
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
        spec_dir: Path | None = None,
        overrides: Sequence[str] = (),
        fork: Fork | None = None,
    ) -> None:
        """Make (or find again) the directory and lock it. `accept_changed_files`: a resume continues though files that
        the run reads are not what they were. `spec_dir`: where relative paths start, when that is not the spec file's
        folder. `fork`: what a new run begins with. Raises RunDirError; then nothing was changed."""
        self.spec, self.spec_dir, self.overrides = spec, spec_dir or spec_path.absolute().parent, tuple(overrides)
        try:
            with explained_disk_errors(self.path):
                self._open(spec, spec_path, fork, resume=resume, accept_changed_files=accept_changed_files)
        except BaseException:
            self.release()
            raise

    def _open(
        self, spec: Spec, spec_path: Path, fork: Fork | None, *, resume: bool, accept_changed_files: bool
    ) -> None:
        begun = self.resolved.is_file()
        if resume and not begun:
            raise RunDirError(f"{self.path} holds no run to resume", hint="leave out --resume to start one there")
        if begun:
            self._take_lock()  # in use is the more helpful message: say that first
        holds_run = begun and self._holds_steps()
        if holds_run and not resume:
            saved = _newest_checkpoint(self.checkpoints)
            raise RunDirError(
                f"{self.path} already holds a run" + (f", saved at step {saved}" if saved else ""),
                hint="add --resume to continue it, or choose another folder with --run-dir or another run.name",
            )
        if not begun and self.path.is_dir() and any(path.name not in _BEFORE_A_RUN for path in self.path.iterdir()):
            raise RunDirError(f"{self.path} is not empty and holds no run", hint="choose another folder with --run-dir")
        if holds_run:
            self._check_same_run(spec)
        self.inputs = inputs_of(spec, self.spec_dir)
        if holds_run:
            self._check_same_inputs(accept_changed_files)
            self.starting_weights = read_starting_weights(self.as_built)
        elif begun:  # it ended before its first step: begin again, keeping the logs
            for file in (self.as_built, self.resolved, *self.path.glob("inputs.*json")):
                file.unlink(missing_ok=True)
        self.path.mkdir(parents=True, exist_ok=True)
        if self._lock is None:
            self._take_lock()
        if not resume:
            (self.path / FORKED_FROM).unlink(missing_ok=True)
        if fork is not None:
            fork.write(self.path)
        self._begin_attempt(spec, spec_path)

    def _holds_steps(self) -> bool:
        """Tell whether a run made steps here."""
        metrics = self.metrics.is_file() and self.metrics.stat().st_size > 0
        return metrics or bool(steps_in(self.checkpoints))

    def _next_attempt(self) -> int:
        names = (re.fullmatch(r"attempt_(\d+)", path.name) for path in (self.path / "logs").glob("attempt_*"))
        return max((int(name[1]) for name in names if name), default=0) + 1

    def _take_lock(self) -> None:
        self._lock = RunLock(self.path, "wait for it, stop it, or choose another folder with --run-dir")

    def _check_same_run(self, spec: Spec) -> None:
        """Refuse changes to what the first attempt began with; keep the others since the last one for a person."""
        now = spec.resolved()
        files = self.resolved, newest(self.path, "resolved")
        first, last = (with_new_keys(read_own(file), now, spec) for file in files)
        refused, _ = differences(first, now, spec.lead_engine)
        self.changes = differences(last, now)[1]
        if refused:
            message = "the spec differs from the one this run was started with, in what may not change:"
            hint = f"put these back as in {self.path / 'spec.toml'}, or start a new run with --run-dir"
            raise RunDirError("\n  - ".join([message, *refused]), hint=hint)

    def _check_same_inputs(self, accept: bool) -> None:
        """Compare with the attempt before: what it was resumed with, or what the run was started with."""
        self.accepted = changes(read_own(newest(self.path, "inputs"), files=Recorded)["files"], self.inputs)
        if self.accepted and not accept:
            raise RunDirError(
                "\n  - ".join(["files that this run reads are not what they were:", *self.accepted]),
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
        write_object(self.path / f"resolved{self._suffix}.json", spec.resolved())  # that makes it a run
        copy = self.path / f"spec{self._suffix}.toml"
        copy.write_text(as_run(spec_path.read_text(encoding="utf-8"), self.overrides), encoding="utf-8")
        self._record_inputs()
        self.checkpoints.mkdir(exist_ok=True)
        self.journal = Journal(self.path, self.attempt)
        where = {"spec": str(spec_path.absolute()), "spec_dir": str(self.spec_dir), "copy": copy.name}
        self.journal.add("start", **where, overrides=list(self.overrides), pid=os.getpid(), host=socket.gethostname())

    def release(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None


@contextmanager
def explained_disk_errors(run_dir: Path) -> Iterator[None]:
    """Explain what a disk or a file system refuses below `run_dir`, with the file."""
    try:
        yield
    except OSError as error:
        file = str(error.filename or "")
        if error.errno in FULL:
            hint = "nothing older was lost: free some space, then run the same command with --resume"
            raise RlctlError(f"the disk of {run_dir} is full: {error}", hint=hint) from None
        if not file.startswith(str(run_dir)) and error.errno not in _DISK_ERRORS:
            raise
        hint = "see what stands there, and that the folder is there and writable, then run the same command again"
        raise RunDirError(f"{file or run_dir} cannot be used: {error.strerror or error}", hint=hint) from None


# ── as seen by check-config ───────────────────────────────────────────────────────────────────────


def run_dir_warnings(spec: Spec) -> list[Problem]:
    """Return at most one warning about the folder `run.dir/run.name`, as seen from here. Nothing is changed."""
    run = RunDir(spec.run.place)
    if not run.path.is_dir() or not any(entry.name != LOCK for entry in run.path.iterdir()):
        return []
    message, hint = f"the run directory {run.path} is not empty", START_OVER
    if owner := owner_of(run.path):
        message, hint = f"the run directory {run.path} is in use by {owner}", f"wait for it or stop it; {START_OVER}"
    elif not run.resolved.is_file():
        message += " and holds no run"
    else:
        saved, hint = _newest_checkpoint(run.checkpoints), f"train with --resume to continue; {START_OVER}"
        has = f"its newest checkpoint is of step {saved} of {spec.run.steps}" if saved else "it has no checkpoint yet"
        message += f": {has}"
    return [Problem("run.name", message, hint, f'"{spec.run.name}"')]


def _newest_checkpoint(folder: Path) -> int:
    """Return the step of the newest checkpoint with a manifest, 0 for none; `train` finds out whether it is whole."""
    steps = (step for step in steps_in(folder) if (step_path(folder, step) / "manifest.json").is_file())
    return max(steps, default=0)
