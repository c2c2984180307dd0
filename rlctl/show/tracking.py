"""Hand hyperparameters, metrics and samples to trackers (`[[tracking]]`), besides the run directory.

No run is lost for a tracker: one that fails is left out from then on, with a warning, and the run directory has
everything. `trackers.json` holds what the run is called there, so that a resume goes on with the same one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rlctl.show.trackers import TRACKERS, Ended, TrackedAttempt, TrackerClient, sample_columns
from specs.errors import Interrupted, Problem, RlctlError, SpecError
from specs.json_file import read_object, write_object
from specs.schema import tracker_tables as tables
from specs.schema.spec import Spec

STATE_FILE = "trackers.json"
Say = Callable[[str], None]


class Trackers:
    """Hand each step to every tracker, within a `with` block."""

    def __init__(self, opened: Sequence[tuple[tables.Tracker, TrackerClient]], warn: Say) -> None:
        self._opened, self._warn = list(opened), warn

    def log(self, metrics: Mapping[str, Any], samples: Sequence[Mapping[str, Any]] = ()) -> None:
        """Log a line of `metrics.jsonl` and samples of its step; values that are no finite numbers are left out."""
        step, values = int(metrics["step"]), numbers(metrics)
        for table, tracker in list(self._opened):
            every = table.samples_every
            due = sample_columns(step, samples) if samples and every and (step == 1 or step % every == 0) else None
            try:
                tracker.log(step, values, due)
            except Exception as error:  # of a foreign package and its network: any
                self._opened.remove((table, tracker))
                self._warn(f"{table.kind} takes no more metrics from step {step} on: {_words(error)}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        interrupted = isinstance(error, Interrupted | KeyboardInterrupt)
        self.close("interrupted" if interrupted else "failed" if error else "finished")

    def close(self, ended: Ended) -> None:
        for table, tracker in self._opened:
            try:
                tracker.close(ended)
            except Exception as failure:
                self._warn(f"{table.kind} may lack the last metrics: {_words(failure)}")


def open_trackers(spec: Spec, run_dir: Path, *, resume: bool, say: Say, warn: Say) -> Trackers:
    """Open the trackers that the spec asks for. `resume`: with the runs that an earlier attempt logged to. Raises
    SpecError where a package is missing, RlctlError where a tracker does not start."""
    state = _read_state(run_dir, warn) if resume and spec.tracking else {}
    opened: list[tuple[tables.Tracker, TrackerClient]] = []
    for number, table in enumerate(spec.tracking):
        kind = table.kind
        known = state.get(kind)
        same = isinstance(known, dict) and known.get("place") == table.place
        attempt = TrackedAttempt(
            spec.run.name, run_dir, spec.resolved(), known.get("run", {}) if same and known else {}
        )
        try:
            tracker = TRACKERS[kind](table, attempt)
        except Exception as error:
            Trackers(opened, warn).close("failed")
            if isinstance(error, ImportError):
                raise SpecError([missing_package(number, table, str(error))]) from None
            hint = f"{TRACKERS[kind].hint}; leave tracking.{number} out to train without it"
            raise RlctlError(f"{kind} did not start: {_words(error)}", hint=hint) from error
        opened.append((table, tracker))
        state[kind] = {"place": table.place, "run": dict(tracker.remembers)}
        if tracker.address:
            say(f"{kind}: {tracker.address}")
    if opened:
        write_object(run_dir / STATE_FILE, state)
    return Trackers(opened, warn)


def missing_package(number: int, table: tables.Tracker, why: str = "") -> Problem:
    """Say that the tracker's package is not there, or, with `why`, cannot be imported."""
    message = f"the package {table.package} " + (f"cannot be imported: {why}" if why else "is not installed")
    return Problem(f"tracking.{number}.kind", message, f"pip install {table.package}", f'"{table.kind}"')


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers among the metrics, without the step."""
    return {
        key: float(value)
        for key, value in metrics.items()
        if key != "step" and isinstance(value, int | float) and math.isfinite(value)
    }


def _read_state(run_dir: Path, warn: Say) -> dict[str, Any]:
    path = run_dir / STATE_FILE
    try:
        return read_object(path) if path.exists() else {}
    except ValueError as error:
        warn(f"{path} {error}: trackers begin a new run")
        return {}


def _words(error: BaseException) -> str:
    """Return the first lines of what a foreign package says."""
    said = " ".join(str(error).split())
    return (said[:400] + "…" if len(said) > 400 else said) or type(error).__name__
