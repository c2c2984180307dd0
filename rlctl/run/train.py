"""`rlctl train`: take a spec to a finished run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.text import Text

from rlctl.loop.driver import Driver, UpdateWindow
from rlctl.loop.step_metrics import idle_s
from rlctl.memory import compare as memory
from rlctl.memory.fit import fit_problems
from rlctl.processes.groups import Groups
from rlctl.processes.hosts import on_fewer_nodes, plan_for_hosts
from rlctl.processes.placement import Plan
from rlctl.run import checkpoints
from rlctl.run.interrupt import Interrupt, as_ctrl_c
from rlctl.run.lineage import Fork, check_held_out, fork_from, spec_source
from rlctl.run.report_command import RunningReport
from rlctl.run.run_dir import RunDir, explained_disk_errors
from rlctl.run.run_exports import checked, export_missing
from rlctl.run.saving import Saver, find_checkpoint
from rlctl.run.startup import start
from rlctl.show.eval_keys import PREFIX, headline
from rlctl.show.journal import first_day
from rlctl.show.metrics_file import MetricsWriter, append_samples, last_values, read_metrics, truncate_after
from rlctl.show.progress import Progress
from rlctl.show.report import render
from rlctl.show.report_page import write_page
from rlctl.show.screen import Screen
from rlctl.show.text_format import counted
from rlctl.show.tracking import Trackers, open_trackers
from specs.errors import (
    GradingError,
    Interrupted,
    LogprobGapError,
    NotFiniteError,
    RlctlError,
    RoleFailure,
    SpecError,
    UsageError,
)
from specs.load.load import load_spec
from specs.rules.all_rules import cross_field_warnings
from specs.schema.metric import Metric
from specs.terminal import json_text

# The roles still answer: what they reached can be saved.
STOPPED = (GradingError, Interrupted, LogprobGapError, NotFiniteError)


def train(
    spec_path: Path,
    overrides: Sequence[str],
    run_dir: Path | None,
    resume: bool,
    accept_changed_files: bool = False,
    *,
    fork_of: str = "",
    screen: Screen | None = None,
) -> Path:
    """Run the spec to its end. `spec_path`: a spec, or at a resume the directory of a run. `fork_of`: RUN_DIR[@STEP],
    whose weights and optimizer state the run begins with. Returns the run directory; every failure is an RlctlError
    with its own exit code."""
    _check_options(resume, accept_changed_files, fork_of)
    with as_ctrl_c():
        source = spec_source(spec_path, resume=resume)
        if source.run_dir and run_dir and run_dir.absolute() != source.run_dir:
            raise UsageError(f"--run-dir {run_dir}: the run is in {source.run_dir}", hint="leave out --run-dir")
        notes: list[str] = []
        spec = load_spec(source.path, list(overrides), notes.append)
        if fewer := on_fewer_nodes(spec):
            notes.append(f"the cluster has fewer nodes than {spec.lead}.nodes: {', '.join(fewer)}")
            spec = load_spec(source.path, [*overrides, *fewer])
        run = RunDir(source.run_dir or run_dir or spec.run.place)
        first = run.path if resume else checkpoints.run_and_step(fork_of)[0] if fork_of else None
        spec, errors, warnings = checked(spec, source.folder, first, starting=True, run_dir=source.run_dir or run_dir)
        errors += fit_problems(spec, source.folder, here=True)[0]
        if errors:
            raise SpecError(source.explained(errors))
        export_missing(spec, source.folder, screen)
        plan = plan_for_hosts(spec, source.folder, run.path)
        fork = fork_from(fork_of, spec, notes.append) if fork_of else None
        if fork is not None:
            check_held_out(fork.run, spec, source.folder)
            fork.checkpoint(spec, source.folder).pin.release()  # whether it fits is found before anything is made
        run.open(
            spec,
            source.path,
            resume=resume,
            accept_changed_files=accept_changed_files,
            spec_dir=source.folder,
            overrides=overrides,
            fork=fork,
        )
        try:
            problems = [*map(str, cross_field_warnings(spec)), *map(str, warnings)]
            problems += [f"resumed with another {change}" for change in run.changes]
            problems += [f"accepted: {change}" for change in run.accepted]
            with explained_disk_errors(run.path), Progress(spec.run.steps, spec.run.name, screen) as progress:
                progress.keep_warnings(lambda text: run.journal.note("warning", text=text))
                for note in notes:
                    progress.message(f"note: {note}")
                for problem in problems:
                    progress.warning(problem)
                progress.message(f"run directory: {run.path}")
                with journaled(run) as pages:
                    attempt(run, plan, progress, resume=resume)
                reached = max(checkpoints.steps_in(run.checkpoints), default=spec.run.steps)  # may be beyond run.steps
                progress.message("; report: ".join([f"done: {counted(reached, 'step')}", *pages]))
        finally:
            run.release()
    return run.path


def _check_options(resume: bool, accept_changed_files: bool, fork_of: str) -> None:
    """Raises UsageError for options that do not go together."""
    if accept_changed_files and not resume:
        raise UsageError("--accept-changed-files: only with --resume", hint="a new run reads the files as they are")
    if fork_of and resume:
        raise UsageError("--from: not with --resume", hint="--resume continues a run as it is; leave one of them out")


@contextmanager
def journaled(run: RunDir) -> Iterator[list[str]]:
    """Note how the attempt ends, for the journal and then for the report; what is yielded then holds the page's path,
    unless the disk refused it."""
    page, pages = run.path / "report.html", list[str]()
    try:
        yield pages
    except BaseException as error:
        known = error if isinstance(error, RlctlError) else RlctlError(f"{type(error).__name__}: {error}")
        outcome = "interrupted" if isinstance(error, Interrupted | KeyboardInterrupt) else "failed"
        run.journal.note("end", outcome=outcome, error=known.message, hint=known.hint)
        raise
    else:
        run.journal.note("end", outcome="done")
    finally:
        # Where the disk refuses, it is made on the next occasion: the error that a person must see is the run's own.
        if write_page(page, render(run.path)) is None:
            pages.append(str(page))


def print_result(run_dir: Path, *, as_json: bool = False) -> None:
    """Print the last line of a run that reached its end, for programs and so not on a terminal: `result: ` and JSON
    with `run_dir`, `step` and the last values of what the run is followed by and of every evaluation. `as_json`: the
    JSON alone, in any case."""
    screen = Screen(outlives=True)
    if not as_json and getattr(screen.file, "isatty", lambda: False)():
        return
    records = read_metrics(run_dir / "metrics.jsonl")
    named = ("step", headline(records).key)
    shown = {key: value for key, value in last_values(records).items() if key in named or key.startswith("eval/")}
    screen.print(Text("result: " * (not as_json) + json_text({"run_dir": str(run_dir), **shown})), soft_wrap=True)


def attempt(run: RunDir, plan: Plan, progress: Progress, *, resume: bool) -> None:
    """Start the roles, take all steps that are left, and end everything that was started. `resume`: continue from the
    newest checkpoint, where there is one; else a run begins at its start, or at that of its fork."""
    checkpoint = find_checkpoint(run, progress) if resume else None
    fork = Fork.of(run.path) if checkpoint is None else None
    begun = checkpoint or fork
    progress.start_at(begun.step if begun else 0)
    window = UpdateWindow()
    with ExitStack() as stack:
        interrupt = stack.enter_context(Interrupt(progress.message))

        def tick() -> None:
            progress.tick()
            interrupt.check(finish_first=window.is_open)

        progress.phase("build")
        groups = stack.enter_context(open_groups(run, plan, tick))
        progress.follow(groups.moving)
        keep_to = None if not resume else checkpoint.step if checkpoint else -1
        if keep_to is not None:
            for file in (run.samples, run.evaluations):
                truncate_after(file, keep_to, progress.warning)
        metrics = stack.enter_context(MetricsWriter(run.metrics, resume_step=keep_to))
        say, warn, at_once = progress.message, progress.warning, interrupt.at_once
        trackers = stack.enter_context(
            open_trackers(run.spec, run.path, resume=resume, say=say, warn=warn, at_once=at_once)
        )
        try:
            driver = start(run, plan, groups, window, progress, first_day(run.path))
            run.add_downloaded()
            saver = Saver(run, plan, groups, progress)
            if checkpoint is not None:
                done = saver.restore(driver, checkpoint)
            else:
                done = saver.begin_from(driver, fork) if fork is not None else 0
            Steps(run, groups, driver, saver, metrics, trackers, interrupt, progress, done).take()
            _compare_memory(run, groups, progress)
        except STOPPED:
            _compare_memory(run, groups, progress)
            raise


def open_groups(run: RunDir, plan: Plan, tick: Callable[[], None]) -> Groups:
    """Make the run's processes, none of them started. `tick` is called at least ten times a second while waiting."""
    limits = run.spec.run
    return Groups(
        plan,
        run.logs,
        start_timeout_s=limits.start_timeout_s,
        verb_timeout_s=limits.verb_timeout_s,
        heartbeat_timeout_s=limits.heartbeat_timeout_s,
        stall_timeout_s=limits.stall_timeout_s,
        on_tick=tick,
    )


def _compare_memory(run: RunDir, groups: Groups, progress: Progress) -> None:
    """Compare what was planned for each role with what it took: for the report, and in a line."""
    if compared := memory.compare(run.spec, run.spec_dir, {role: groups[role] for role in run.spec.roles}):
        memory.write(compared, run.path)
        progress.message(f"peak memory: {memory.line(compared)}")


METRICS: tuple[Metric, ...] = (
    Metric(
        name="time/driver_s",
        unit="s",
        meaning="Of the step, in which no rank was at work: the driver and its messages.",
    ),
    Metric(name="time/wall_s", unit="s", meaning="The step with its evaluations, without its checkpoint."),
)


@dataclass
class Steps:
    """Take the steps of one attempt, after `done` earlier ones: drive, evaluate, log and save."""

    run: RunDir
    groups: Groups
    driver: Driver
    saver: Saver
    metrics: MetricsWriter
    trackers: Trackers
    interrupt: Interrupt
    progress: Progress
    done: int

    def __post_init__(self) -> None:
        self.spec = self.run.spec
        self.report = RunningReport(self.run.path)

    def take(self) -> None:
        """Take all steps that are left. Where a person or a limit ends them early, the last finished one is saved."""
        try:
            self._before_the_first()
            for step in range(self.done + 1, self.spec.run.steps + 1):
                self._step(step)
        except STOPPED as error:
            self._save_last_step("interrupted" if isinstance(error, Interrupted) else "stopped")
            raise
        except RoleFailure as failure:
            failure.advise(self._where_to_resume())
            raise
        finally:
            self.report.close()

    def _before_the_first(self) -> None:
        """Give the rollout the actor's weights; evaluate a run from the start before it learns, and what an attempt
        saved that was interrupted in its evaluation."""
        driver, step = self.driver, self.done
        driver.begin(step)
        if self.spec.every and step == 0:
            before = driver.evaluate(0)
            self._log({"step": 0, **before.metrics})
            append_samples(self.run.evaluations, 0, before.samples)
            self.progress.evaluation(0, before.metrics)
        elif self._is_due(step) and self._unevaluated(step):
            self._make_up(step)

    def _is_due(self, step: int) -> bool:
        """Tell whether the model is evaluated after a step."""
        every = self.spec.every
        return every is not None and (step % every == 0 or step == self.spec.run.steps)

    def _unevaluated(self, step: int) -> bool:
        """Tell whether the last line is of this step, and without an evaluation."""
        records = read_metrics(self.run.metrics)[-1:]
        return [one["step"] for one in records if not any(key.startswith(PREFIX) for key in one)] == [step]

    def _make_up(self, step: int) -> None:
        """Evaluate after the last step that is behind, and add that to its line."""
        evaluated = self.driver.evaluate(step)
        truncate_after(self.run.evaluations, step - 1, self.progress.warning)
        append_samples(self.run.evaluations, step, evaluated.samples)
        self.metrics.add_to_last(evaluated.metrics)
        self.trackers.log({"step": step, **evaluated.metrics})
        self.progress.evaluation(step, evaluated.metrics)

    def _step(self, step: int) -> None:
        spec, last = self.spec, step == self.spec.run.steps
        self.groups.take_busy()
        started = time.monotonic()
        record = self.driver.step(step)
        record.metrics["time/driver_s"] = idle_s(self.groups.take_busy(), started, time.monotonic())
        self.done = step
        try:
            if self._is_due(step):
                evaluated = self.driver.evaluate(step)
                record.metrics.update(evaluated.metrics)
                append_samples(self.run.evaluations, step, evaluated.samples)
        finally:  # also when interrupted: no checkpoint may be ahead of the metrics
            record.metrics["time/wall_s"] = time.monotonic() - started
            self._log(record.metrics, record.samples)
            self.progress.step(record.metrics)
            self.report.follow(step)
        if step % spec.checkpoint.every == 0 or last:
            self.driver.window.open()
            self.saver.save(self.driver, step)
            self.driver.window.close()
        self.interrupt.check()

    def _log(self, metrics: dict[str, Any], samples: Sequence[dict[str, Any]] = ()) -> None:
        self.metrics.write(metrics)
        append_samples(self.run.samples, metrics["step"], samples)
        self.trackers.log(metrics, samples)

    def _where_to_resume(self) -> str:
        saved = self.saver.saved
        if saved <= 0:
            return f"no step was saved yet (checkpoint.every = {self.spec.checkpoint.every})"
        if not (path := checkpoints.step_path(self.run.checkpoints, saved)).is_dir():
            return f"step {saved} was saved, but {path} is no longer there: where it is now, --resume continues it"
        return f"continue after step {saved}, which is saved, with the same command and --resume"

    def _save_last_step(self, why: str) -> None:
        """Keep what the last finished step reached, where the roles can still be asked. A Ctrl-C now ends it here."""
        kept = max(self.saver.saved, 0)
        if self.done <= kept:
            return
        if self.driver.window.is_open:
            self.progress.warning(f"{why} within an update or a save: steps after {kept} are not saved")
            return
        self.progress.message(f"{why}: saving the last finished step (Ctrl-C drops it)")
        self.interrupt.forget()
        try:
            self.saver.save(self.driver, self.done)
        except RlctlError as error:
            self.progress.warning(f"not saved: {error.message}")
