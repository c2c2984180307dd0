"""`rlctl train`: from a spec to a finished run."""

from __future__ import annotations

import errno
import json
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rlctl import memory_compare
from rlctl.driver import Driver
from rlctl.groups import Groups
from rlctl.hosts import plan_for_hosts
from rlctl.interrupt import Interrupt
from rlctl.memory_watch import MemoryWatch
from rlctl.metrics import MetricsWriter, truncate_after
from rlctl.plan import Plan
from rlctl.progress import Progress
from rlctl.report import write_report
from rlctl.roads import plan_road
from rlctl.run_dir import RunDir
from rlctl.saving import Saver, find_checkpoint
from rlctl.start import start
from rlctl.step_metrics import Clock, idle_s
from rlctl.text_format import counted
from rlctl.tracking import open_tracker
from specs.errors import Interrupted, LogprobGapError, MemoryGrowthError, RlctlError, SpecError
from specs.load import load_spec
from specs.rules import cross_field_warnings, file_problems
from specs.schema import Spec

DISK_FULL_HINT = "nothing older was lost: free some space, then run the same command with --resume"


def train(spec_path: Path, overrides: Sequence[str], run_dir: Path | None, resume: bool) -> int:
    """Run the spec to its end. Returns 0; every failure is an RlctlError with its own exit code."""
    spec = load_spec(spec_path, list(overrides))
    spec_dir = spec_path.absolute().parent
    errors, warnings = file_problems(spec, spec_dir, starting=True, run_dir=run_dir)
    if errors:
        raise SpecError(errors)
    run = RunDir(run_dir or Path(spec.run.dir) / spec.run.name)
    plan = plan_for_hosts(spec, spec_dir, run.path)
    run.open(spec, spec_path, resume=resume)
    try:
        with Progress(spec.run.steps, 0, spec.run.name) as progress:
            for warning in [*cross_field_warnings(spec), *warnings]:
                progress.warning(str(warning))
            for change in run.changes:
                progress.warning(f"resumed with another {change}")
            progress.message(f"run directory: {run.path}")
            Run(spec, spec_dir, run, plan, progress).execute(resume)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise RlctlError(f"the disk of {run.path} is full: {error}", hint=DISK_FULL_HINT) from None
    finally:
        run.release()
    return 0


class Run:
    """One attempt at a run: starts the roles, drives the steps, saves, and ends everything it started."""

    def __init__(self, spec: Spec, spec_dir: Path, run: RunDir, plan: Plan, progress: Progress) -> None:
        self.spec, self.spec_dir, self.run, self.plan, self.progress = spec, spec_dir, run, plan, progress
        self.road = plan_road(spec, spec_dir, run.path, plan)
        self.interrupt = Interrupt()
        self.done = 0  # steps completed
        self.driver: Driver | None = None
        self.memory_watch = MemoryWatch(spec.run.max_memory_growth_GiB, progress.warning)

    def execute(self, resume: bool) -> None:
        """All of it. `resume`: from the newest checkpoint, where there is one."""
        checkpoint = find_checkpoint(self.spec, self.spec_dir, self.run, self.progress) if resume else None
        with ExitStack() as stack:
            stack.enter_context(self.interrupt)
            self.progress.phase("start")
            groups = self.groups = stack.enter_context(self._open_groups())
            self.saver = Saver(self.spec, self.spec_dir, self.run, self.plan, groups, self.progress)
            keep_to = None if not resume else checkpoint.step if checkpoint else -1
            if keep_to is not None:
                truncate_after(self.run.samples, keep_to)
            writer = MetricsWriter(self.run.metrics, resume_step=keep_to, warn=self.progress.warning)
            self.metrics = stack.enter_context(writer)
            self.tracker = stack.enter_context(open_tracker(self.spec, self.run.path))
            try:
                driver = start(self.spec, self.spec_dir, self.run, self.plan, self.road, groups, self.progress)
                self.driver = driver
                if checkpoint is not None:
                    self.saver.restore(driver, checkpoint)
                    self.done = checkpoint.step
                self._steps(driver)
                self._compare_memory()
            except (Interrupted, LogprobGapError, MemoryGrowthError) as error:
                self._save_last_step("interrupted" if isinstance(error, Interrupted) else "stopped")
                self._compare_memory()
                raise
            finally:
                write_report(self.run.path)
        self.progress.message(f"done: {counted(self.done, 'step')}; report: {self.run.path / 'report.html'}")

    def _compare_memory(self) -> None:
        """What was planned for each role against what it took: for the report, and in a line."""
        planned = memory_compare.planned_bytes(self.spec, self.spec_dir)
        compared = memory_compare.compare(planned, {role: self.groups[role] for role in planned})
        if compared:
            memory_compare.write(compared, self.run.path)
            self.progress.message(f"memory at most: {memory_compare.line(compared)}")

    def _open_groups(self) -> Groups:
        run = self.spec.run
        return Groups(
            self.plan,
            self.run.logs,
            start_timeout_s=run.start_timeout_s,
            verb_timeout_s=run.verb_timeout_s,
            heartbeat_timeout_s=run.heartbeat_timeout_s,
            on_tick=self._tick,
        )

    def _tick(self) -> None:
        """Called while waiting for any role, at least ten times a second."""
        self.progress.tick()
        self.interrupt.check(finish_first=self.driver is not None and self.driver.updating)

    def _steps(self, driver: Driver) -> None:
        spec = self.spec
        driver.sync.weights.version = self.done
        driver.send_weights(self.done, Clock())
        if spec.eval and self.done == 0:
            before = driver.evaluate(0)
            self._log({"step": 0, **before})
            self.progress.evaluation(spec.eval.name, 0, before[f"eval/{spec.eval.name}/reward_mean"])
        for number in range(self.done + 1, spec.run.steps + 1):
            self.groups.busy.clear()
            started = time.monotonic()
            record = driver.step(number)
            record.metrics["time/driver_s"] = idle_s(self.groups.busy, started, time.monotonic())
            self.done = number
            last = number == spec.run.steps
            try:
                if spec.eval and (number % spec.eval.every == 0 or last):
                    record.metrics.update(driver.evaluate(number))
            finally:  # also when interrupted: no checkpoint may be ahead of the metrics
                record.metrics["time/wall_s"] = time.monotonic() - started
                self._log(record.metrics)
                self._write_samples(number, record.samples)
                self.progress.step(record.metrics)
            self.memory_watch.see(record.metrics, number)
            if number % spec.checkpoint.every == 0 or last:
                self.saver.save(driver, number)
            self.interrupt.check()

    def _log(self, metrics: dict[str, Any]) -> None:
        self.metrics.write(metrics)
        self.tracker.log(metrics)

    def _write_samples(self, number: int, samples: list[dict[str, Any]]) -> None:
        with open(self.run.samples, "a", encoding="utf-8") as file:
            for sample in samples:
                file.write(json.dumps({"step": number, **sample}, ensure_ascii=False) + "\n")

    def _save_last_step(self, why: str) -> None:
        """Keep what the last finished step reached, where the roles can still be asked. A Ctrl-C now ends it here."""
        if self.driver is None or self.driver.updating or self.done <= max(self.saver.saved, 0):
            return
        self.progress.message(f"{why}: saving the last finished step (Ctrl-C drops it)")
        self.interrupt.forget()
        try:
            self.saver.save(self.driver, self.done)
        except RlctlError as error:
            self.progress.warning(f"not saved: {error.message}")
