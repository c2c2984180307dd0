"""Show the runs of a sweep: while they run, and ranked at the end."""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

from rich.live import Live
from rich.table import Table
from rich.text import Text

from rlctl.show import eval_keys
from rlctl.show.charts import drawable
from rlctl.show.metrics_file import last_values, read_end
from rlctl.show.report_compare import LAST_SHARE, final
from rlctl.show.screen import Screen, redraws
from rlctl.show.text_format import columns, counted, duration, number, of_steps
from specs.errors import RunDirError

State = Literal["waiting", "begun", "running", "done", "done before", "failed", "interrupted"]
DONE = ("done", "done before")
REDRAW_S = 1.0
LOG_LINES = 12  # shown of a run that failed
SEED = "run.seed"


@dataclass(frozen=True)
class Trial:
    """Hold one run of a sweep. `values`: what it does not share with the others; `overrides`: each `--set`."""

    name: str
    values: Mapping[str, str]
    overrides: tuple[str, ...]
    run_dir: Path
    steps: int
    state: State = "waiting"


@dataclass(frozen=True)
class Outcome:
    """Say what a run reached. `score`: its last evaluation, else the mean of a metric over the last tenth of its steps;
    `key`: the metric's; `scored`: what that is."""

    step: int
    score: float | None
    metrics: Mapping[str, Any]
    key: str
    scored: eval_keys.Headline


def outcome(run_dir: Path) -> Outcome:
    try:
        records = read_end(run_dir / "metrics.jsonl", LAST_SHARE)
    except RunDirError:
        records = []
    metrics = last_values(records)
    scored = eval_keys.headline(records)
    key, score = scored.key, final(records, scored.key, 1.0)
    if sets := eval_keys.by_set(metrics):
        name, values = next(iter(sets.items()))
        scored = next(each for each in eval_keys.HEADLINES if each.metric in values)
        key, score = f"{eval_keys.PREFIX}{name}/{scored.metric}", drawable(values[scored.metric])
    return Outcome(records[-1]["step"] if records else 0, score, metrics, key, scored)


class SweepTable:
    """Show the state of all runs as it changes, within a `with` block."""

    def __init__(self, keys: Sequence[str], trials: Sequence[Trial], folder: Path, console: Screen) -> None:
        self.keys, self.folder, self.console = list(keys), folder, console
        self.trials = {trial.name: trial for trial in trials}
        self._began: dict[str, float] = {}
        self._live: Live | None = None
        self._drawn = 0.0

    def __enter__(self) -> Self:
        if redraws(self.console):
            self._live = Live(self._running(), console=self.console, auto_refresh=False, transient=True)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def say(self, text: str) -> None:
        self.console.print(Text(text), soft_wrap=True)

    # ── while they run ────────────────────────────────────────────────────────────────────────────

    def print_plan(self) -> None:
        self.say(f"{counted(len(self.trials), 'run')} in {self.folder}")
        for trial in self.trials.values():
            settings = "  ".join(f"{key}={value}" for key, value in trial.values.items())
            self.say(f"{trial.name}  {trial.state}  {settings}")

    def print_head(self, jobs: int) -> None:
        done = sum(trial.state in DONE for trial in self.trials.values())
        before = f", {done} of them done before" if done else ""
        self.say(f"{counted(len(self.trials), 'run')}{before}, {jobs} at a time, in {self.folder}")

    def now(self, name: str, state: State) -> None:
        """Show that a run began or ended."""
        self.trials[name] = replace(self.trials[name], state=state)
        if state == "running":
            self._began[name] = time.monotonic()
            self.say(f"{name}: started")
            return
        found = outcome(self.trials[name].run_dir)
        took = duration(time.monotonic() - self._began[name])
        self.say(f"{name}: {state} at step {found.step} after {took}, {found.key} {number(found.score)}")
        if state == "failed":
            self.say("\n".join(f"  | {line}" for line in _last_words(self.folder / f"{name}.log")))

    def tick(self) -> None:
        if self._live is not None and time.monotonic() - self._drawn > REDRAW_S:
            self._drawn = time.monotonic()
            self._live.update(self._running(), refresh=True)

    def _running(self) -> Table:
        table = Table(box=None, pad_edge=False)
        for title in ("run", "state", "step", "score", "time"):
            table.add_column(title, justify="left" if title in ("run", "state") else "right", no_wrap=True)
        for trial in self.trials.values():
            if trial.state == "running":
                found, spent = outcome(trial.run_dir), duration(time.monotonic() - self._began[trial.name])
                table.add_row(trial.name, trial.state, of_steps(found.step, trial.steps), number(found.score), spent)
        return table

    # ── what came of it ───────────────────────────────────────────────────────────────────────────

    def print_results(self, console: Screen | None = None) -> None:
        """Print every run, best first; over seeds, where they are swept, means and standard deviations. `console`:
        where, if not where the runs were shown."""
        self.console = console or self.console
        ranked = self._ranked()
        rows = [
            (*map(trial.values.__getitem__, self.keys), number(end.score), of_steps(end.step, trial.steps), trial.state)
            for trial, end in ranked
        ]
        self.say(columns((*self.keys, _score_name(ranked), "step", "state"), rows))
        if SEED in self.keys and len(self.keys) > 1 and (text := self._over_seeds(ranked)):
            self.say(f"\nover seeds\n{text}")
        report = self.folder / "report.html"  # not there where no run took a step
        self.say(f"\n{f'report: {report}; ' if report.exists() else ''}results: {self.folder / 'sweep.json'}")

    def as_object(self) -> dict[str, Any]:
        """Return what `sweep.json` holds."""
        ranked = self._ranked()
        runs = [
            {"name": trial.name, "run_dir": str(trial.run_dir), "set": dict(trial.values), "state": trial.state}
            | {"step": found.step, "score": found.score, "metrics": found.metrics}
            for trial, found in ranked
        ]
        return {"keys": self.keys, "score": _score_name(ranked), "runs": runs}

    def _ranked(self) -> list[tuple[Trial, Outcome]]:
        """Return the runs, best first, then those that did not end: their scores are of earlier steps, or of none. What
        is scored otherwise than most, as by another objective, compares with none and has no score here."""
        found = [(trial, outcome(trial.run_dir)) for trial in self.trials.values()]
        kinds = [kind for kind, _ in Counter(end.scored for _, end in found if end.score is not None).most_common(1)]
        found = [(trial, end if end.scored in kinds else replace(end, score=None)) for trial, end in found]
        return sorted(found, key=lambda pair: (pair[0].state in DONE, _worth(pair[1])), reverse=True)

    def _over_seeds(self, ranked: Sequence[tuple[Trial, Outcome]]) -> str:
        others, rises = [key for key in self.keys if key != SEED], not ranked[0][1].scored.falls
        scores: dict[tuple[str, ...], list[float]] = {}
        for trial, found in ranked:
            if trial.state in DONE and found.score is not None:
                scores.setdefault(tuple(trial.values[key] for key in others), []).append(found.score)
        rows = [
            (*values, number(statistics.fmean(own)), number(statistics.stdev(own) if own[1:] else None), str(len(own)))
            for values, own in sorted(scores.items(), key=lambda pair: statistics.fmean(pair[1]), reverse=rises)
        ]
        return columns((*others, "mean", "std", "runs"), rows) if rows else ""  # where no run ended


def _score_name(ranked: Sequence[tuple[Trial, Outcome]]) -> str:
    """Name the metric that runs are ranked by."""
    return next((end.key for _, end in ranked if end.score is not None), eval_keys.HEADLINES[0].key)


def _worth(found: Outcome) -> float:
    """Return a number that is higher for a better run; lowest where it has no score."""
    if found.score is None:
        return -math.inf
    return -found.score if found.scored.falls else found.score


def _last_words(log: Path) -> list[str]:
    """Return the error that a run ended with, else its last lines."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    starts = [index for index, line in enumerate(lines) if line.startswith("error:")]
    return lines[starts[-1] :][:LOG_LINES] if starts else lines[-LOG_LINES:]
