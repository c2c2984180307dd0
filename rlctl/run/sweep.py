"""`rlctl sweep`: a run for every combination of values, each in a directory of its own.

Every run is `rlctl train` in a process of its own, so that one that fails takes no other with it. The same call again
continues: runs that are done stay, others are resumed.
"""

from __future__ import annotations

import itertools
import re
import signal
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from rlctl.memory.fit import fit_problems
from rlctl.processes.placement import usable_cores
from rlctl.run.checkpoints import step_path
from rlctl.run.interrupt import as_ctrl_c
from rlctl.run.lineage import read_own
from rlctl.run.resume import differences, with_new_keys
from rlctl.run.run_exports import checked, with_run_exports
from rlctl.run.run_lock import RunLock
from rlctl.show.journal import last_attempt, read_journal
from rlctl.show.report_compare import read_runs, render_comparison
from rlctl.show.report_page import write_page
from rlctl.show.screen import Screen, progress_screen
from rlctl.show.sweep_table import DONE, State, SweepTable, Trial, outcome
from specs.errors import Problem, SpecError, UsageError
from specs.json_file import write_object
from specs.load.load import load_spec
from specs.load.overrides import parse_value
from specs.packages import with_our_packages
from specs.terminal import json_text

POLL_S = 0.2
ENDED: dict[int, State] = {0: "done", 130: "interrupted"}
NOT_SWEPT = ("run.name", "run.dir")
# `rlctl train` that saves its last finished step and ends when the sweep is gone.
TRAIN = """import signal, sys
from workers.watchdog import die_with_parent
die_with_parent(signal.SIGTERM)
from rlctl.cli import main
sys.exit(main(["train", *sys.argv[1:]]))"""


Swept = dict[str, tuple[str, ...]]  # key → the values that it takes, as they are written after `--set`


def sweep(
    spec_path: Path,
    overrides: Sequence[str],
    folder: Path | None,
    jobs: int,
    dry_run: bool,
    *,
    as_json: bool = False,
    quiet: bool = False,
) -> int:
    """Run every combination. Returns 0 when all are done, 1 when one failed, 130 when interrupted. Raises SpecError or
    UsageError before anything is started."""
    fixed, swept = expand(overrides)
    if not swept:
        hint = "write --set KEY=VALUE,VALUE, e.g. --set actor.optimizer.lr=1e-6,3e-6; `rlctl train` does one run"
        raise UsageError("no --set has several values", hint=hint)
    trials, folder = plan(spec_path, fixed, swept, folder, starting=not dry_run)
    if (folder / "resolved.json").exists():
        raise UsageError(f"{folder} holds a run", hint="name a folder for the sweep with --dir")
    table = SweepTable(list(swept), trials, folder, progress_screen(as_json=as_json, quiet=quiet))
    if dry_run:
        table.print_plan()
        if as_json:
            print(json_text(table.as_object()))
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    lock = RunLock(folder, "wait for it, stop it, or name another folder with --dir")
    try:
        table.print_head(jobs)
        interrupted = Runs(spec_path, folder, jobs, table).all()
        write_object(folder / "sweep.json", table.as_object())
        if begun := [trial.run_dir for trial in table.trials.values() if outcome(trial.run_dir).step]:
            write_page(folder / "report.html", render_comparison(read_runs(begun), folder / "report.html"))
        table.print_results(Screen(outlives=True) if quiet and not as_json else None)
        if as_json:
            print(json_text(table.as_object()))
    finally:
        lock.release()
    return 130 if interrupted else 1 if any(trial.state not in DONE for trial in table.trials.values()) else 0


# ── which runs ────────────────────────────────────────────────────────────────────────────────────


def expand(overrides: Sequence[str]) -> tuple[list[str], Swept]:
    """Divide settings into those of every run and those that have several values. Raises UsageError."""
    fixed: list[str] = []
    swept: Swept = {}
    for text in overrides:
        key, equals, value = text.partition("=")
        values = split_values(value) if equals else (value,)
        key = key.strip()
        if key in swept:
            raise UsageError(f"--set {text}: {key} is swept already", hint="write all its values in one --set")
        if len(values) == 1:
            fixed.append(text)
            continue
        if key in NOT_SWEPT:
            raise UsageError(f"--set {text}: {key} is of each run", hint="the runs are named after their values")
        if len({repr(parse_value(value)) for value in values}) < len(values):
            raise UsageError(f"--set {text}: a value is there twice", hint="name each once: it would count twice")
        swept[key] = values
    return fixed, swept


def split_values(text: str) -> tuple[str, ...]:
    """Split `1e-6,3e-6` in two values; commas in brackets, braces and quotes divide none: `[0, 1],[2, 3]` are two."""
    if not isinstance(parse_value(text), str):
        return (text,)
    values, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        elif character in "[{":
            depth += 1
        elif character in "]}":
            depth -= 1
        if character == "," and not depth and not quote:
            values.append("")
        else:
            values[-1] += character
    return tuple(value.strip() for value in values)


def plan(
    spec_path: Path, fixed: Sequence[str], swept: Swept, folder: Path | None, *, starting: bool
) -> tuple[list[Trial], Path]:
    """Return a trial for each combination, and the folder of all. Raises SpecError with what is wrong in any of them,
    each problem once. `starting`: they begin now; else what this machine lacks is no problem."""
    combined = [dict(zip(swept, values, strict=True)) for values in itertools.product(*swept.values())]
    found: dict[str, tuple[Problem, list[str]]] = {}
    trials: list[Trial] = []
    for name, values in zip(_names(combined), combined, strict=True):
        own = [*fixed, *(f"{key}={value}" for key, value in values.items())]
        own.sort(key=lambda text: sum(text.strip().startswith(f"{key}.") for key in swept))  # a table, then keys in it
        try:
            spec = load_spec(spec_path, own)
        except SpecError as error:
            for problem in error.problems:
                found.setdefault(str(problem), (problem, []))[1].append(name)
            continue
        folder = folder or spec.run.place.with_name(f"{spec.run.name}-sweep")
        own.append(f"run.name={spec.run.name}-{name}")
        trials.append(Trial(name, values, tuple(own), (folder / name).absolute(), spec.run.steps))
    if not found:
        trials = [_as_left(trial, spec_path) for trial in trials]
        for name, problem in _refused(trials, spec_path, starting):
            found.setdefault(str(problem), (problem, []))[1].append(name)
    if found:
        raise SpecError([_in_some(problem, of, len(combined)) for problem, of in found.values()])
    assert folder is not None
    return trials, folder.absolute()


def _names(combined: Sequence[dict[str, str]]) -> list[str]:
    """Name each as a folder and a run may be called, `lr_1e-6-seed_0`, and no two alike. Values that are added behind
    the others leave every name as it was."""
    keys = list(combined[0])
    last = Counter(key.rpartition(".")[2] for key in keys)
    short = {key: tail if last[tail := key.rpartition(".")[2]] == 1 else key for key in keys}
    names = list[str]()
    for values in combined:
        name = "-".join(f"{short[key]}_{_clean(value)}" for key, value in values.items())
        free = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(1)))
        names.append(next(each for each in free if each not in names))
    return names


def _clean(value: str) -> str:
    value = value.rstrip("/").rpartition("/")[2] or value
    return re.sub(r"[^A-Za-z0-9._-]+", "-", value).strip("-._")[:40] or "x"


def _in_some(problem: Problem, of: Sequence[str], count: int) -> Problem:
    listed = ", ".join(of[:3]) + (f" and {len(of) - 3} more" if len(of) > 3 else "")
    return problem if len(of) == count else replace(problem, message=f"{problem.message} (in {listed})")


def _as_left(trial: Trial, spec_path: Path) -> Trial:
    """Return the trial as an earlier call left it. Raises UsageError where another spec made what is there."""
    resolved = trial.run_dir / "resolved.json"
    if not resolved.exists():
        return trial
    spec = load_spec(spec_path, trial.overrides)
    spec, _ = with_run_exports(spec, spec_path.absolute().parent, trial.run_dir)
    now = spec.resolved()
    refused, _ = differences(with_new_keys(read_own(resolved), now, spec), now)
    if refused:
        message = f"{trial.run_dir} holds a run of another spec: {'; '.join(refused)}"
        raise UsageError(message, hint="put the spec back, or name another folder with --dir")
    saved = (step_path(trial.run_dir / "checkpoints", trial.steps) / "manifest.json").is_file()
    ended = last_attempt(read_journal(trial.run_dir)).get("outcome")  # its last evaluation may have been interrupted
    return replace(trial, state="done before" if saved and ended == "done" else "begun")


def _refused(trials: Sequence[Trial], spec_path: Path, starting: bool) -> Iterator[tuple[str, Problem]]:
    """Yield what `train` would refuse of the trials that are left. Those that differ by their seed alone are looked at
    once: large data and tokenizers take a second each time."""
    known: dict[str, list[Problem]] = {}
    for trial in (one for one in trials if one.state not in DONE):
        spec, spec_dir, run_dir = load_spec(spec_path, trial.overrides), spec_path.absolute().parent, trial.run_dir
        alike = spec.model_copy(update={"run": spec.run.model_copy(update={"name": "", "seed": 0})})
        key = str(alike.resolved())
        if key not in known:
            options = {"starting": starting, "elsewhere": not starting, "run_dir": run_dir}
            spec, errors, _ = checked(spec, spec_dir, run_dir, **options)
            known[key] = [*errors, *fit_problems(spec, spec_dir, here=starting)[0]]
        yield from ((trial.name, problem) for problem in known[key])


# ── running them ──────────────────────────────────────────────────────────────────────────────────


class Runs:
    """Run the trials of a sweep, at most `jobs` of them at a time."""

    def __init__(self, spec_path: Path, folder: Path, jobs: int, table: SweepTable) -> None:
        self.spec_path, self.folder, self.jobs, self.table = spec_path, folder, jobs, table
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def all(self) -> bool:
        """Run until none is left. Returns whether a person ended it; then every run has saved what it reached."""
        waiting = deque(trial.name for trial in self.table.trials.values() if trial.state in ("waiting", "begun"))
        with as_ctrl_c(), self.table:
            try:
                while waiting or self._running:
                    while waiting and len(self._running) < self.jobs:
                        self._start(waiting.popleft())
                    self._look()
                return False
            except KeyboardInterrupt:
                self._end()
                return True

    def _start(self, name: str) -> None:
        trial = self.table.trials[name]
        resumed = ["--resume"] if trial.state == "begun" else []
        settings = [word for text in trial.overrides for word in ("--set", text)]
        command = [sys.executable, "-P", "-c", TRAIN, str(self.spec_path), "--run-dir", str(trial.run_dir)]
        env = {"WANDB_RUN_GROUP": self.folder.name, **with_our_packages()}
        if self.jobs > 1:
            env.setdefault("RLCTL_CPU_CORES", str(max(1, usable_cores() // self.jobs)))
        with (self.folder / f"{name}.log").open("ab") as log:
            self._running[name] = subprocess.Popen(
                [*command, *settings, *resumed], env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        self.table.now(name, "running")

    def _look(self) -> None:
        self.table.tick()
        time.sleep(POLL_S)
        for name, process in list(self._running.items()):
            if (code := process.poll()) is not None:
                del self._running[name]
                self.table.now(name, ENDED.get(code, "failed"))

    def _end(self) -> None:
        """Have each run save its last finished step, as after a Ctrl-C; a second one drops that."""
        self.table.say("interrupted: every run saves its last finished step; the same call continues from there")
        while self._running:
            for process in self._running.values():
                process.send_signal(signal.SIGINT)
            try:
                while self._running:
                    self._look()
            except KeyboardInterrupt:
                continue
