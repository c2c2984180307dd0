"""`rlctl train`: from a spec to a finished run."""

from __future__ import annotations

import errno
import json
import platform
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any

from rlctl import __version__, ahead_files, as_built, checkpoints, memory_compare
from rlctl.build import build_bodies, model_paths
from rlctl.driver import Driver
from rlctl.gap_budget import GapBudget
from rlctl.groups import Group, Groups
from rlctl.hosts import plan_for_hosts
from rlctl.memory_watch import MemoryWatch
from rlctl.metrics import MetricsWriter, truncate_after
from rlctl.plan import Plan
from rlctl.progress import Progress
from rlctl.report import write_report
from rlctl.residency import SLEEP_LEVEL, Residency, sleep_level
from rlctl.resume import about_model, check_fits
from rlctl.revive import SteadySync
from rlctl.roads import plan_road, prepare
from rlctl.run_dir import RunDir
from rlctl.step_metrics import Clock, idle_s
from rlctl.sync import WeightSync
from rlctl.tracking import open_tracker
from specs.as_built import AsBuilt
from specs.errors import Interrupted, LogprobGapError, MemoryGrowthError, RlctlError, SpecError
from specs.load import load_spec
from specs.messages import Verb
from specs.model_asked import models_asked
from specs.rules import cross_field_warnings, file_problems
from specs.schema import RoleName, Spec

DISK_FULL_HINT = "nothing older was lost: free some space, then run the same command with --resume"
PROOF_TOKENS = 16  # greedy tokens per proof prompt that an export must repeat


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
        self.saved = -1  # step of the newest checkpoint of this attempt
        self.driver: Driver | None = None
        self.memory_watch = MemoryWatch(spec.run.max_memory_growth_GiB, self._warn)
        self.groups: Groups

    def execute(self, resume: bool) -> None:
        checkpoint = self._checkpoint() if resume else None
        with ExitStack() as stack:
            stack.enter_context(self.interrupt)
            self.progress.phase("start")
            self.groups = stack.enter_context(self._open_groups())
            keep_to = None if not resume else checkpoint.step if checkpoint else -1
            if keep_to is not None:
                truncate_after(self.run.samples, keep_to)
            self.metrics = stack.enter_context(MetricsWriter(self.run.metrics, resume_step=keep_to, warn=self._warn))
            self.tracker = stack.enter_context(open_tracker(self.spec, self.run.path))
            try:
                self._start()
                if checkpoint is not None:
                    self._restore(checkpoint)
                self._steps()
                self._compare_memory()
            except (Interrupted, LogprobGapError, MemoryGrowthError) as error:
                self._save_last_step("interrupted" if isinstance(error, Interrupted) else "stopped")
                self._compare_memory()
                raise
            finally:
                write_report(self.run.path)
        self.progress.message(f"done: {self.done} steps; report: {self.run.path / 'report.html'}")

    def _compare_memory(self) -> None:
        """What was planned for each role against what it took: for the report, and in a line."""
        planned = memory_compare.planned_bytes(self.spec, self.spec_dir)
        compared = memory_compare.compare(planned, {role: self.groups[role] for role in planned})
        if compared:
            memory_compare.write(compared, self.run.path)
            self.progress.message(f"memory at most: {memory_compare.line(compared)}")

    # ── start ─────────────────────────────────────────────────────────────────────────────────────

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

    def _warn(self, text: str) -> None:
        self.progress.warning(text)

    def _start(self) -> None:
        """Start every process, build every model, and refuse to go on if one is not what was asked."""
        groups, spec = self.groups, self.spec
        groups.start(spec.roles)
        bodies = build_bodies(spec, self.spec_dir, self.run.path)
        reports = self._build(bodies)
        as_built.check(spec, reports, models_asked(spec, self.spec_dir))
        as_built.check_same_start(reports, self.run.as_built)
        as_built.write(reports, self.run.as_built, self.road)
        self.progress.table(as_built.table(spec, reports))
        data = groups["reward"].call(Verb.OPEN_DATA, {})[0].body
        self._say_data(data)
        model = reports["actor"][0].model
        assert model is not None
        self.vocab_size = model.vocab_size
        trainers = [groups[role] for role in ("actor", "ref") if role in spec.roles]
        prepare(self.road, self.run.path)
        self.progress.message(f"weight road: {self.road}")
        residency = Residency(self.plan.colocated, trainers, groups["rollout"], sleep_level(spec))
        weights = WeightSync(
            groups["actor"],
            groups["rollout"],
            residency,
            road=self.road,
            dtype=spec.rollout_dtype,
            bucket_bytes=int(spec.sync.bucket_MiB * 2**20),
            temperature=spec.rollout.temperature,
            max_gap=spec.probe_gap,
            vocab=self.vocab_size,
        )
        sync = SteadySync(
            groups,
            residency,
            weights,
            body=bodies["rollout"],
            built=reports["rollout"],
            limit=spec.rollout.max_restarts,
            start_timeout_s=spec.run.start_timeout_s,
            warn=self._warn,
        )
        roles: dict[str, Group] = {role: groups[role] for role in spec.roles}
        self.driver = Driver(spec, roles, residency, sync, self._gap_budget(bodies), self.progress)

    def _gap_budget(self, bodies: Mapping[RoleName, dict[str, Any]]) -> GapBudget:
        sampling = {key: getattr(self.spec.rollout, key) for key in ("temperature", "top_p", "top_k")}
        about = {**sampling, "rollout_dtype": self.spec.rollout_dtype, "actor": bodies["actor"]}
        return GapBudget(*self.spec.logprob_gaps, self.run.path, about, self._warn)

    def _build(self, bodies: Any) -> dict[RoleName, list[AsBuilt]]:
        """Build all roles at once; on shared devices the rollout builds first and sleeps before the trainers come."""
        groups, timeout_s = self.groups, self.spec.run.start_timeout_s
        waves: list[list[RoleName]] = [list(self.spec.roles)]
        if self.plan.colocated:
            waves = [["reward", "rollout"], [role for role in self.spec.roles if role in ("actor", "ref")]]
        reports: dict[RoleName, list[AsBuilt]] = {}
        for wave in waves:
            calls = {role: groups[role].post(Verb.BUILD, bodies[role], timeout_s=timeout_s) for role in wave}
            for role, call in calls.items():
                reports[role] = [AsBuilt.model_validate(answer.body) for answer in call.result()]
            if self.plan.colocated and "rollout" in wave:
                groups["rollout"].call(Verb.SLEEP, {"level": SLEEP_LEVEL})
        return reports

    def _say_data(self, data: Mapping[str, Any]) -> None:
        words = {"dropped_overlong": "too long", "dropped_bad": "bad"}
        dropped = [f"{data[key]} {word}" for key, word in words.items() if data[key]]
        self.progress.message(
            f"data: {data['rows']:,} prompts"
            + (f", {data['eval_rows']:,} held out" if data.get("eval_rows") else "")
            + (f"; dropped: {', '.join(dropped)}" if dropped else "")
        )

    # ── steps ─────────────────────────────────────────────────────────────────────────────────────

    def _steps(self) -> None:
        spec = self.spec
        driver = self.driver
        assert driver is not None
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
                self.save()
            self.interrupt.check()

    def _log(self, metrics: dict[str, Any]) -> None:
        self.metrics.write(metrics)
        self.tracker.log(metrics)

    def _write_samples(self, number: int, samples: list[dict[str, Any]]) -> None:
        with open(self.run.samples, "a", encoding="utf-8") as file:
            for sample in samples:
                file.write(json.dumps({"step": number, **sample}, ensure_ascii=False) + "\n")

    # ── saving and resuming ───────────────────────────────────────────────────────────────────────

    def save(self) -> None:
        """Checkpoint the state after step `self.done`."""
        assert self.driver is not None
        self.driver.residency.enter("save", step=self.done)
        self.progress.phase("checkpoint")
        prompts = self._proof_prompts()

        def write_actor(folder: Path) -> list[checkpoints.Marks]:
            body = {"folder": str(folder), "proof_prompts": prompts, "proof_tokens": PROOF_TOKENS}
            return [answer.body["files"] for answer in self.groups["actor"].call(Verb.SAVE, body, step=self.done)]

        def write_driver(folder: Path) -> dict[str, Any]:
            assert self.driver is not None
            ahead = self.driver.ahead
            return {"position": ahead.cursor, "ahead": ahead_files.write(folder, ahead.drain(Clock()))}

        checkpoints.save(
            self.run.checkpoints,
            self.done,
            about=self._about(),
            write_actor=write_actor,
            write_driver=write_driver,
            keep=self.spec.checkpoint.keep,
        )
        self.saved = self.done
        self.progress.checkpoint(self.done)

    def _proof_prompts(self) -> list[list[int]]:
        """Two of the run's own first prompts."""
        body = {"what": "train", "position": 0, "count": 2, "group_size": 1}
        batch = self.groups["reward"].call(Verb.PROMPTS, body)[0].batch
        return [tokens.tolist() for tokens in batch.sequences("tokens_T")]

    def _about(self) -> dict[str, Any]:
        spec = self.spec
        return {
            "run": spec.run.name,
            "attempt": self.run.attempt,
            "spec_sha256": checkpoints.spec_hash(spec),
            **about_model(spec, self.spec_dir),
            "actor_ranks": spec.actor.processes,
            "dtype": spec.actor.dtype,
            "model_path": model_paths(spec, self.spec_dir)["actor"],
            "trust_remote_code": spec.model.trust_remote_code,
            "python": next(role.python for role in self.plan.roles if role.role == "actor"),
            "versions": {"python": platform.python_version(), "rlctl": __version__, **self._actor_versions()},
        }

    def _actor_versions(self) -> dict[str, str]:
        return json.loads(self.run.as_built.read_text())["actor"][0]["versions"]  # type: ignore[no-any-return]

    def _checkpoint(self) -> checkpoints.Checkpoint | None:
        checkpoint = checkpoints.newest(self.run.checkpoints, self._warn)
        if checkpoint is not None:
            check_fits(checkpoint.manifest, self.spec, self.spec_dir)
        checkpoints.set_aside_after(self.run.checkpoints, checkpoint.step if checkpoint else 0)
        if checkpoint is None:
            self.progress.message("no checkpoint to resume from: starting at step 1")
        return checkpoint

    def _restore(self, checkpoint: checkpoints.Checkpoint) -> None:
        assert self.driver is not None
        self.groups["actor"].call(Verb.LOAD, {"folder": str(checkpoint.path / "actor")})
        state = checkpoint.state
        kept = ahead_files.read(checkpoint.path / "driver", state.get("ahead", ()))
        too_old = self.driver.ahead.restore(int(state["position"]), kept)
        self.done = self.saved = checkpoint.step
        self.progress.start_at(self.done)
        self.progress.message(f"resumed from {checkpoint.path}")
        if too_old:
            steps = f"{min(too_old)} to {max(too_old)}" if len(too_old) > 1 else f"{min(too_old)}"
            self._warn(
                f"{sum(too_old.values())} samples drawn ahead for step {steps} are dropped: older than "
                f"rollout.max_staleness = {self.spec.rollout.max_staleness} allows. Their prompts are drawn again"
            )

    def _save_last_step(self, why: str) -> None:
        """Keep what the last finished step reached, where the roles can still be asked. A Ctrl-C now ends it here."""
        if self.done <= max(self.saved, 0) or self.driver is None or self.driver.updating:
            return
        self.progress.message(f"{why}: saving the last finished step (Ctrl-C drops it)")
        self.interrupt.forget()
        try:
            self.save()
        except RlctlError as error:
            self._warn(f"not saved: {error.message}")


class Interrupt:
    """Ctrl-C and SIGTERM, turned into `Interrupted` at the next wait.

    The first one waits for an update to finish, so that the state can be saved; a second one does not.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.count, self.name = 0, ""
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        for number in self.SIGNALS:
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.count, self.name = self.count + 1, signal.Signals(number).name

    def check(self, *, finish_first: bool = False) -> None:
        if self.count > (1 if finish_first else 0):
            raise Interrupted(f"interrupted ({self.name})", hint="go on with the same command and --resume")

    def forget(self) -> None:
        """Waiting works again until the next signal."""
        self.count = 0
