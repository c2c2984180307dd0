"""Hand hyperparameters, metrics and samples to trackers (`[[tracking]]`), besides the run directory.

No run is lost for a tracker: one that fails is left out from then on, with a warning, and the run directory has
everything. `trackers.json` holds what the run is called there, so that a resume continues the same one.
"""

from __future__ import annotations

import atexit
import itertools
import json
import math
import os
import re
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stdout, suppress
from pathlib import Path
from queue import Full, Queue
from threading import Thread
from types import TracebackType
from typing import Any, ClassVar, Literal, Self

from rlctl.show.eval_keys import HEADLINES
from rlctl.show.text_format import counted
from specs.errors import Interrupted, NotHere, Problem, RlctlError, SpecError
from specs.json_file import read_object, read_or_empty, write_object
from specs.load.dotted_keys import flattened
from specs.schema import tracker_tables as tables
from specs.schema.spec import Spec

STATE_FILE = "trackers.json"
WAIT_S = 2.0  # that a step waits for a tracker
WAITING = 1000  # steps that wait for a tracker that is slower than they
_PLACE = "run_dir"  # beside the kinds of trackers in it: where the run directory was
Say = Callable[[str], None]
Guard = Callable[[], AbstractContextManager[None]]
Ended = Literal["finished", "failed", "interrupted"]
Rows = Sequence[Mapping[str, Any]]  # decoded samples of a step, all with the same columns


class Trackers:
    """Hand each step to every tracker, within a `with` block, in which standard output is left to the result."""

    def __init__(
        self, opened: Sequence[tuple[tables.Tracker, TrackerClient]], warn: Say, at_once: Guard = nullcontext
    ) -> None:
        self._sides, self._warn, self._at_once = [_Beside(*one) for one in opened], warn, at_once
        self._left_out: list[TrackerClient] = []
        self._stdout = redirect_stdout(sys.stderr) if opened else nullcontext()

    def log(self, metrics: Mapping[str, Any], samples: Rows = ()) -> None:
        """Log a line of `metrics.jsonl` and samples of its step; values that are no finite numbers are left out."""
        step = int(metrics["step"])
        numbers = {key: value for key, value in metrics.items() if key != "step" and isinstance(value, int | float)}
        values = {key: float(value) for key, value in numbers.items() if math.isfinite(value)}
        for side in list(self._sides):
            every = side.table.samples_every
            due = every and (step == 1 or step % every == 0)
            try:
                with self._at_once():
                    late = side.log(step, values, sample_rows(step, samples) if due else ())
            except Interrupted as error:  # it may be well, and is closed as the others are
                side.held = True
                self._warn(f"{side.table.kind} may lack step {step}: {_words(error)}")
                continue
            if late:
                waits = f"the run goes on, and up to {WAITING} steps wait for it"
                self._warn(f"{side.table.kind} has not taken step {step} in {WAIT_S:.0f} s: {waits}")
            self._leave_out_failed(side)

    def _leave_out_failed(self, side: _Beside) -> None:
        if side.failed is not None:
            step, error = side.failed
            self._sides.remove(side)
            self._left_out.append(side.tracker)
            self._warn(f"{side.table.kind} takes no more metrics from step {step} on: {_words(error)}")

    def __enter__(self) -> Self:
        self._stdout.__enter__()
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        interrupted = isinstance(error, Interrupted | KeyboardInterrupt)
        try:
            self.close("interrupted" if interrupted else "failed" if error else "finished")
        finally:
            self._stdout.__exit__(None, None, None)

    def close(self, ended: Ended) -> None:
        for side in list(self._sides):
            try:
                with self._at_once():
                    side.finish(self._warn)
                    self._leave_out_failed(side)
                    if side in self._sides:
                        side.tracker.close(ended)
            except Exception as failure:
                self._warn(f"{side.table.kind} may lack the last metrics: {_words(failure)}")
            if side.lost:
                self._warn(f"{side.table.kind} lacks {counted(side.lost, 'step')}: too many waited for it")
        for tracker in self._left_out:  # a server that is away is waited for when all is said
            atexit.register(_close_quietly, tracker, ended)


class _Beside:
    """Log to one tracker in a thread of its own: a server that hangs, and a package that tries again for minutes, hold
    one step up for `WAIT_S`; from then on steps wait for the tracker beside the run."""

    def __init__(self, table: tables.Tracker, tracker: TrackerClient) -> None:
        self.table, self.tracker = table, tracker
        self.failed: tuple[int, Exception] | None = None  # the step, and why
        self.lost = 0  # steps that found too many waiting
        self.held = False  # a person did not wait for it
        self._prompt = True
        self._steps: Queue[tuple[int, Mapping[str, float], Rows] | None] = Queue(WAITING)
        Thread(target=self._work, daemon=True).start()

    def log(self, step: int, values: Mapping[str, float], rows: Rows) -> bool:
        """Hand over a step and wait until it is logged. Return True the first time that lasts, which is the last."""
        try:
            self._steps.put_nowait((step, values, rows))
        except Full:
            self.lost += 1
        late = self._prompt and not self._wait(WAIT_S)
        self._prompt &= not late
        return late

    def finish(self, warn: Say) -> None:
        """Wait until all steps are logged, as long as the package tries, and end the thread."""
        if not self.held:
            if not self._wait(WAIT_S):
                left = counted(self._steps.unfinished_tasks, "step")
                warn(f"the run waits for {self.table.kind}, which has not taken {left}; Ctrl-C ends the wait")
            self._wait(None)
            self._steps.put_nowait(None)

    def _wait(self, most_s: float | None) -> bool:
        with self._steps.all_tasks_done:
            return self._steps.all_tasks_done.wait_for(lambda: not self._steps.unfinished_tasks, most_s)

    def _work(self) -> None:
        while (item := self._steps.get()) is not None:
            try:
                if self.failed is None:
                    self.tracker.log(*item)
            except Exception as error:  # of a foreign package and its network: any
                self.failed = item[0], error
            self._steps.task_done()


def _close_quietly(tracker: TrackerClient, ended: Ended) -> None:
    """Close one that was left out, when Python ends and before its own package does: MLflow would call it finished."""
    with suppress(Exception):
        tracker.close(ended)


def sample_rows(step: int, samples: Rows) -> Rows:
    """Return a row for each sample with every column that any of them has; each term of the reward is a column."""
    rows = []
    for sample in samples:
        rest = {name: value for name, value in sample.items() if name not in ("terms", "id")}
        plain = {
            name: value if isinstance(value, str | int | float | None) else str(value) for name, value in rest.items()
        }
        rows.append({"step": step, **plain, **{f"term_{i}": term for i, term in enumerate(sample.get("terms") or ())}})
    columns = dict.fromkeys(name for row in rows for name in row)
    return [{name: row.get(name) for name in columns} for row in rows]


def open_trackers(
    spec: Spec, run_dir: Path, *, resume: bool, say: Say, warn: Say, at_once: Guard = nullcontext
) -> Trackers:
    """Open the trackers that the spec asks for. `resume`: with the runs that an earlier attempt logged to; `at_once`:
    within it a signal ends the wait for a server. Raises SpecError where a package is missing, RlctlError where a
    tracker does not start."""
    state = _read_state(run_dir, warn) if resume and spec.tracking else {}
    original = _original(run_dir, state)
    opened: list[tuple[tables.Tracker, TrackerClient]] = []
    for number, table in enumerate(spec.tracking):
        kind, known = table.kind, state.get(table.kind)
        same = isinstance(known, dict) and known.get("place") == table.place
        remembered = known.get("run", {}) if same and known else {}
        if remembered and original.get(kind) == known:
            warn(f"{kind} begins a new run: {state[_PLACE]}, of which this is a copy, logs to the one there")
            remembered = {}
        try:
            with at_once(), redirect_stdout(sys.stderr):  # which `--json` keeps for the result
                tracker = TRACKERS[kind](table, spec, run_dir, remembered)
        except Exception as error:
            Trackers(opened, warn, at_once).close("failed")
            if isinstance(error, Interrupted):
                raise
            if isinstance(error, ImportError):
                raise SpecError([missing_package(number, table, str(error))]) from None
            hint = f"{TRACKERS[kind].hint}; leave tracking.{number} out to train without it"
            hint += f"; without {run_dir / STATE_FILE} it begins a new run there" if remembered else ""
            raise RlctlError(f"{kind} did not start: {_words(error)}", hint=hint) from error
        opened.append((table, tracker))
        state[kind] = {"place": table.place, "run": dict(tracker.remembers)}
        if tracker.address:
            say(f"{kind}: {tracker.address}")
    if opened:
        write_object(run_dir / STATE_FILE, {**state, _PLACE: str(run_dir.absolute())})
    return Trackers(opened, warn, at_once)


def missing_package(number: int, table: tables.Tracker, why: str = "") -> Problem:
    """Say that the tracker's package is not there, or, with `why`, cannot be imported."""
    message = f"the package {table.package} " + (f"cannot be imported: {why}" if why else "is not installed")
    return NotHere(f"tracking.{number}.kind", message, f"pip install {table.package}", f'"{table.kind}"')


def _read_state(run_dir: Path, warn: Say) -> dict[str, Any]:
    path = run_dir / STATE_FILE
    try:
        return read_object(path) if path.exists() else {}
    except ValueError as error:
        warn(f"{path} {error}: trackers begin a new run")
        return {}


def _original(run_dir: Path, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the run directory remembers that this one is a copy of; {} where it was not copied, but moved."""
    theirs, ours = Path(str(state.get(_PLACE, run_dir))) / STATE_FILE, run_dir / STATE_FILE
    found = read_or_empty(theirs)
    return {} if found and theirs.samefile(ours) else found


def _words(error: BaseException) -> str:
    """Return the first lines of a foreign package's message."""
    text = _without_password(" ".join((error.message if isinstance(error, RlctlError) else str(error)).split()))
    return (text[:800] + "…" if len(text) > 800 else text) or type(error).__name__


def _without_password(text: str) -> str:
    """Leave users and passwords out of addresses: what is said goes to the journal and the report, too."""
    return re.sub(r"//[^/\s]*@", "//", text)


# ── the services ──────────────────────────────────────────────────────────────────────────────────


class TrackerClient(ABC):
    """Log to one service, as its table of `[[tracking]]` says. `known`: what a tracker `remembers` of an earlier
    attempt of the same run, {} for a new one; `address`: where a person finds it. Opening it imports its package:
    raises ImportError, or what the package raises."""

    hint: ClassVar[str]  # where it does not start
    remembers: Mapping[str, str] = {}
    address = ""

    @abstractmethod
    def __init__(self, table: Any, spec: Spec, run_dir: Path, known: Mapping[str, str]) -> None: ...

    @abstractmethod
    def log(self, step: int, metrics: Mapping[str, float], samples: Rows) -> None:
        """Log what a step left. After a resume, a step may come a second time."""

    @abstractmethod
    def close(self, ended: Ended) -> None:
        """Write out what is pending."""


class TensorBoardTracker(TrackerClient):
    """Write event files. A resumed run writes another file to the same folder; of a step that comes twice, the later
    value is shown. Hyperparameters: the tab HParams, and the whole spec as text. Not by SummaryWriter: its thread dies
    of a full disk, and whoever writes then waits forever."""

    hint = "see that the run directory can be written to"

    def __init__(self, table: tables.TensorBoard, spec: Spec, run_dir: Path, known: Mapping[str, str]) -> None:
        from tensorboardX import event_file_writer, proto, summary

        (folder := run_dir / "tensorboard").mkdir(exist_ok=True)
        self._writer = event_file_writer.EventsWriter(str(folder / "events"))
        self._event, self._summary = proto.event_pb2.Event, summary
        plain = {
            key: value if isinstance(value, bool | int | float | str) else json.dumps(value)
            for key, value in _hyperparameters(spec).items()
        }
        named = summary.hparams(plain, {each.key: 0.0 for each in HEADLINES})  # which runs are compared by
        text = summary.text("spec", _code(json.dumps(spec.resolved(), indent=2, ensure_ascii=False)))
        self._write(0, [*named, text])

    def _write(self, step: int, summaries: Sequence[Any]) -> None:
        for each in summaries:
            self._writer.write_event(self._event(wall_time=time.time(), step=step, summary=each))
        self._writer.flush()

    def log(self, step: int, metrics: Mapping[str, float], samples: Rows) -> None:
        shown = [self._summary.text("samples", "\n\n---\n\n".join(map(_markdown, samples)))] if samples else []
        self._write(step, [*itertools.starmap(self._summary.scalar, metrics.items()), *shown])

    def close(self, ended: Ended) -> None:
        self._writer.close()


def _markdown(row: Mapping[str, object]) -> str:
    """Put what a model wrote in code blocks, so that nothing of it is markup."""
    return "\n\n".join(f"**{name}**\n\n{_code(str(value))}" for name, value in row.items() if name != "step")


def _code(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines() or [""])


class WandBTracker(TrackerClient):
    """Make `step` a metric of its own and the x axis of all others: W&B's own step only ever grows, and would drop what
    a resumed run computes again after its checkpoint."""

    hint = "`wandb login`, or WANDB_MODE=offline to log to the run directory"

    def __init__(self, table: tables.WandB, spec: Spec, run_dir: Path, known: Mapping[str, str]) -> None:
        import wandb

        self._wandb: Any = wandb
        self._run = wandb.init(
            project=table.project,
            entity=table.entity or None,
            name=spec.run.name,
            id=known.get("id"),
            resume="allow" if known else None,
            dir=str(run_dir),
            config=spec.resolved(),
            settings=wandb.Settings(console="off", quiet=True),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self.remembers = {"id": self._run.id}
        self.address = "" if self._run.offline else self._run.url

    def log(self, step: int, metrics: Mapping[str, float], samples: Rows) -> None:
        more = {}
        if samples:
            data = [list(row.values()) for row in samples]
            more["samples"] = self._wandb.Table(columns=list(samples[0]), data=data, allow_mixed_types=True)
        self._run.log({"step": step, **metrics, **more})

    def close(self, ended: Ended) -> None:
        self._run.finish(exit_code=0 if ended == "finished" else 1)


class TrackioTracker(TrackerClient):
    """Find a run again by its id: `init` resumes the newest of the runs that share a name."""

    hint = "`hf auth login` for a Space; without `space_id` it logs to this machine"

    def __init__(self, table: tables.Trackio, spec: Spec, run_dir: Path, known: Mapping[str, str]) -> None:
        import trackio

        self._trackio: Any = trackio
        self._run = trackio.init(
            project=table.project,
            name=known.get("name", spec.run.name),
            space_id=table.space_id or None,
            config=spec.resolved(),
            resume="allow" if known else "never",
        )
        self._run.id = known.get("id", self._run.id)
        self.remembers = {"name": self._run.name, "id": self._run.id}

    def log(self, step: int, metrics: Mapping[str, float], samples: Rows) -> None:
        more = {}
        if samples:
            import pandas

            more["samples"] = self._trackio.Table(dataframe=pandas.DataFrame(samples))
        self._run.log({**metrics, **more}, step=step)

    def close(self, ended: Ended) -> None:
        self._trackio.finish()  # not the run's own, which would be called again when Python ends


class MLflowTracker(TrackerClient):
    """Log hyperparameters as parameters, which MLflow never changes: those of the first attempt. `resolved.json` among
    the artifacts is that of the last one. Samples are one table, `samples.json`, that grows."""

    hint = (
        "see that `tracking_uri` or MLFLOW_TRACKING_URI names a server that answers, or a database, sqlite:///mlflow.db"
    )
    at_once, longest = 100, 500  # parameters in a request, and characters of one, that every server takes
    statuses: ClassVar = {"finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}

    def __init__(self, table: tables.MLflow, spec: Spec, run_dir: Path, known: Mapping[str, str]) -> None:
        os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
        import mlflow
        from filelock import FileLock

        self._mlflow: Any = mlflow
        if table.tracking_uri:
            mlflow.set_tracking_uri(table.tracking_uri)
        uri = mlflow.get_tracking_uri()
        database = uri.removeprefix("sqlite:///")
        with FileLock(f"{database}.lock") if database != uri else nullcontext():  # it makes its tables without one
            mlflow.set_experiment(table.experiment)
        if known:
            run = mlflow.start_run(run_id=known["run_id"])
        else:
            run = mlflow.start_run(run_name=spec.run.name)
            values = [(_mlflow_name(key), self._parameter(value)) for key, value in _hyperparameters(spec).items()]
            for start in range(0, len(values), self.at_once):
                mlflow.log_params(dict(values[start : start + self.at_once]))
        mlflow.log_dict(spec.resolved(), "resolved.json")
        self.remembers = {"run_id": run.info.run_id}
        self.address = f"run {run.info.run_id} of experiment {table.experiment} at {_without_password(uri)}"

    def _parameter(self, value: Any) -> str:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        return text if len(text) <= self.longest else text[: self.longest - 1] + "…"

    def log(self, step: int, metrics: Mapping[str, float], samples: Rows) -> None:
        named, run_id = {_mlflow_name(key): value for key, value in metrics.items()}, self.remembers["run_id"]
        self._mlflow.log_metrics(named, step=step, run_id=run_id)  # in another thread no run is the active one
        if samples:
            columns = {name: [row[name] for row in samples] for name in samples[0]}
            self._mlflow.log_table(columns, artifact_file="samples.json", run_id=run_id)

    def close(self, ended: Ended) -> None:
        self._mlflow.end_run(status=self.statuses[ended])


def _mlflow_name(key: str) -> str:
    """Replace what MLflow does not take: `pass@4` becomes `pass_4`."""
    return re.sub(r"[^\w\-. /]", "_", key, flags=re.ASCII)


def _hyperparameters(spec: Spec) -> dict[str, Any]:
    """Return the spec by dotted keys; keys without a value are left out."""
    return {key: value for key, value in flattened(spec.resolved()).items() if value not in (None, "", [], {})}


TRACKERS: dict[str, type[TrackerClient]] = {
    "tensorboard": TensorBoardTracker,
    "wandb": WandBTracker,
    "trackio": TrackioTracker,
    "mlflow": MLflowTracker,
}
