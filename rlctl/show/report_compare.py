"""Compare several runs on one page: curves over each other, differences of their specs, a table of how they ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlctl.show import eval_keys
from rlctl.show.charts import COLORS, chart, points
from rlctl.show.journal import last_attempt, newest, read_journal
from rlctl.show.metrics_file import read_metrics
from rlctl.show.report import CHARTS, Records
from rlctl.show.report_page import header, note, page, section, table
from rlctl.show.text_format import duration, number, share
from specs.errors import RunDirError
from specs.json_file import read_object
from specs.load.dotted_keys import flattened

LAST_SHARE = 0.1  # a final value is the mean over that share of a run's steps: a step's own is noisy
# What a run ends with: heading → key of metrics.jsonl.
FINALS = {
    "finished": "rollout/finished",
    "length": "rollout/length_mean",
    "entropy": "actor/entropy",
    "tokens/s": "perf/tokens_per_s",
}
Rows = tuple[list[str], list[list[str]]]  # headings and cells of a table for a page or a terminal


@dataclass(frozen=True)
class ComparedRun:
    """Hold a run under a name that no other compared run has."""

    name: str
    path: Path
    records: Records
    resolved: Mapping[str, Any]
    outcome: str


def read_runs(run_dirs: Sequence[Path]) -> list[ComparedRun]:
    """Raises RunDirError where one is no run."""
    names = _names([run_dir.absolute() for run_dir in run_dirs])
    runs = []
    for run_dir, name in zip(run_dirs, names, strict=True):
        try:
            resolved = read_object(newest(run_dir, "resolved"))
        except ValueError as error:
            hint = "name run directories, as `rlctl train` makes them"
            raise RunDirError(f"{run_dir} is not a run directory: its resolved.json {error}", hint=hint) from None
        last = last_attempt(read_journal(run_dir))
        outcome = str(last.get("outcome", "unfinished")) if last else "–"
        runs.append(ComparedRun(name, run_dir.absolute(), read_metrics(run_dir / "metrics.jsonl"), resolved, outcome))
    return runs


def _names(paths: Sequence[Path]) -> list[str]:
    """Return the shortest ends of the paths by which they differ."""
    for depth in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [f"{path.name} ({index})" for index, path in enumerate(paths, start=1)]


def final(records: Records, key: str, share: float = LAST_SHARE) -> float | None:
    """Return the mean over the last `share` of the steps; None where the run has no such metric."""
    found = [y for _, y in points(records, key)]
    last = found[-max(1, round(share * len(found))) :]
    return sum(last) / len(last) if last else None


def render_comparison(runs: Sequence[ComparedRun], target: Path) -> str:
    """Return the page as text. `target`: where it will be, for its links to the runs' own pages."""
    title = f"{len(runs)} runs"
    explained = note("Means over the last tenth of the steps; evaluations: the last one.")
    keys, rows = differences(runs)
    parts = [
        header(title, {run.name: run.path / "report.html" for run in runs}, target.absolute().parent),
        section("How they ended", table(*finals(runs)) + explained),
        section("What differs in their specs", table(keys, rows)) if rows else note("Their specs are the same."),
        _charts(runs),
    ]
    return page(title, "".join(parts))


def differences(runs: Sequence[ComparedRun]) -> Rows:
    """Return a row for each dotted key whose values the runs do not share, but for their names."""
    flat = [flattened(run.resolved) for run in runs]
    keys = dict.fromkeys(key for values in flat for key in values if key != "run.name")
    found = {key: [values.get(key) for values in flat] for key in keys}
    rows = [
        [key, *("–" if value is None else str(value) for value in values)]
        for key, values in found.items()
        if any(value != values[0] for value in values)
    ]
    return ["key", *(run.name for run in runs)], rows


def finals(runs: Sequence[ComparedRun]) -> Rows:
    known = {key for run in runs for line in run.records for key in line}
    heads = {each.key: each.word for each in (eval_keys.headline(run.records) for run in runs) if each.key in known}
    shown = {key if [*heads.values()].count(word) > 1 else word: key for key, word in heads.items()}
    shown |= {heading: key for heading, key in FINALS.items() if key in known}
    keys = eval_keys.keys(line for run in runs for line in run.records) | shown
    rows = []
    for run in runs:
        steps = [line["step"] for line in run.records]
        spent = sum(y for _, y in points(run.records, "time/wall_s"))
        cells = [run.name, str(max(steps, default=0)), run.outcome, duration(spent)]
        for heading, key in keys.items():
            series = points(run.records, key)
            value = final(run.records, key) if key in shown.values() else series[-1][1] if series else None
            cells.append(share(value) if heading == "finished" and value is not None else number(value))
        rows.append(cells)
    return ["run", "steps", "end", "time", *keys], rows


def _charts(runs: Sequence[ComparedRun]) -> str:
    """Draw a chart of each metric, with a line for each run: as many runs as can be told apart."""
    shown = eval_keys.headline(line for run in runs for line in run.records)
    wanted = {shown.word.capitalize(): (shown.key, "")}
    evaluated = eval_keys.keys(line for run in runs for line in run.records)
    wanted |= {heading[0].upper() + heading[1:]: (key, "") for heading, key in evaluated.items()}
    wanted["Reward spread"] = ("reward/std", "standard deviation")
    for title, unit, keys in CHARTS:
        for label, key in keys.items():
            wanted[title if len(keys) == 1 else f"{title}, {label}"] = (key, unit)
    figures = []
    for title, (key, unit) in wanted.items():
        series = {run.name: points(run.records, key) for run in runs[:COLORS]}
        if any(y for found in series.values() for _, y in found):
            figures.append(chart(title, series, unit=unit))
    more = note(f"Charts show the first {COLORS} runs.") if len(runs) > COLORS else ""
    return f"{more}<section class=charts>{''.join(figures)}</section>"
