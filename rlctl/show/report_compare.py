"""Several runs on one page: curves over each other, differences of their specs, a table of how they ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlctl.show import eval_keys
from rlctl.show.charts import Point, line_chart
from rlctl.show.journal import read_journal
from rlctl.show.metrics_file import read_metrics
from rlctl.show.report import CHARTS, Records, points
from rlctl.show.report_script import link, page
from rlctl.show.report_style import STYLE
from rlctl.show.text_format import duration, html, number, share
from specs.errors import RunDirError
from specs.json_file import read_object
from specs.load.dotted_keys import flattened

COLOURS = 8  # of lines that can be told apart
FINAL = 0.1  # share of a run's steps, its last ones, that a final value is the mean of
# What a run ends with: heading → key of metrics.jsonl.
FINALS = {
    "reward": "reward/mean",
    "finished": "rollout/finished",
    "length": "rollout/length_mean",
    "entropy": "actor/entropy",
    "tokens/s": "perf/tokens_per_s",
}


@dataclass(frozen=True)
class ComparedRun:
    """A run as it is compared: by a name that no other of them has."""

    name: str
    path: Path
    records: Records
    resolved: Mapping[str, Any]
    outcome: str

    def final(self, key: str) -> float | None:
        """Mean over the last steps; None where the run has no such metric."""
        found = [y for _, y in points(self.records, key)]
        last = found[-max(1, round(FINAL * len(found))) :]
        return sum(last) / len(last) if last else None


def read_runs(run_dirs: Sequence[Path]) -> list[ComparedRun]:
    """Raises RunDirError where one is no run."""
    names = _names([run_dir.absolute() for run_dir in run_dirs])
    runs = []
    for run_dir, name in zip(run_dirs, names, strict=True):
        try:
            resolved = read_object(run_dir / "resolved.json")
        except ValueError as error:
            hint = "name run directories, as `rlctl train` makes them"
            raise RunDirError(f"{run_dir} is no run: its resolved.json {error}", hint=hint) from None
        ends = [line for line in read_journal(run_dir) if line["event"] in ("start", "end")]
        outcome = str(ends[-1].get("outcome", "unfinished")) if ends else "–"
        runs.append(ComparedRun(name, run_dir.absolute(), read_metrics(run_dir / "metrics.jsonl"), resolved, outcome))
    return runs


def _names(paths: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths by which they differ."""
    for depth in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [f"{path.name} ({index})" for index, path in enumerate(paths, start=1)]


def render_comparison(runs: Sequence[ComparedRun], target: Path) -> str:
    """The page as text. `target`: where it will be, for its links to the runs' own pages."""
    title = html(f"{len(runs)} runs")
    folder = target.absolute().parent
    parts = [
        f"<header><h1>{title}</h1>{_links(runs, folder)}</header>",
        _finals(runs),
        _differences(runs),
        _charts(runs),
    ]
    return page(title, STYLE, "".join(parts))


def _links(runs: Sequence[ComparedRun], folder: Path) -> str:
    pages = {run.name: run.path / "report.html" for run in runs}
    links = [f'<a href="{link(page, folder)}">{html(name)}</a>' for name, page in pages.items() if page.exists()]
    return f"<nav>{' · '.join(links)}</nav>"


def differing(runs: Sequence[ComparedRun]) -> dict[str, list[Any]]:
    """Dotted key → its value in each run, where they are not all equal; None: it has none. Not their names."""
    flat = [flattened(run.resolved) for run in runs]
    keys = dict.fromkeys(key for values in flat for key in values)
    told = {key: [values.get(key) for values in flat] for key in keys}
    return {
        key: values for key, values in told.items() if any(one != values[0] for one in values) and key != "run.name"
    }


def _evaluations(runs: Sequence[ComparedRun]) -> dict[str, str]:
    """Heading → key of what every evaluation of any run says first."""
    return eval_keys.keys(line for run in runs for line in run.records)


def finals(runs: Sequence[ComparedRun]) -> tuple[list[str], list[list[str]]]:
    """Headings, and a row of texts for each run: a table for a page or a terminal."""
    keys = _evaluations(runs) | FINALS
    rows = []
    for run in runs:
        steps = [line["step"] for line in run.records]
        spent = sum(y for _, y in points(run.records, "time/wall_s"))
        cells = [run.name, str(max(steps, default=0)), run.outcome, duration(spent)]
        for heading, key in keys.items():
            series = points(run.records, key)
            value = run.final(key) if key in FINALS.values() else series[-1][1] if series else None
            cells.append(share(value) if heading == "finished" and value is not None else number(value))
        rows.append(cells)
    return ["run", "steps", "end", "time", *keys], rows


def _finals(runs: Sequence[ComparedRun]) -> str:
    headings, rows = finals(runs)
    note = "<p class=note>Means over the last tenth of the steps; evaluations: the last one.</p>"
    return f"<section><h2>How they ended</h2>{_table(headings, rows)}{note}</section>"


def _differences(runs: Sequence[ComparedRun]) -> str:
    found = differing(runs)
    if not found:
        return '<p class="note">Their specs are the same.</p>'
    rows = [[key, *("–" if value is None else str(value) for value in values)] for key, values in found.items()]
    return (
        f"<section><h2>What differs in their specs</h2>{_table(['key', *(run.name for run in runs)], rows)}</section>"
    )


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html(one)}</th>" for one in headings)
    body = "".join(f"<tr>{''.join(f'<td>{html(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<div class=wide><table><tr>{head}</tr>{body}</table></div>"


def _charts(runs: Sequence[ComparedRun]) -> str:
    """A chart of each metric, with a line of each run: as many runs as can be told apart."""
    wanted = {"Reward": ("reward/mean", "")}
    wanted |= {heading[0].upper() + heading[1:]: (key, "") for heading, key in _evaluations(runs).items()}
    wanted["Reward spread"] = ("reward/std", "standard deviation")
    for title, unit, keys in CHARTS:
        for label, key in keys.items():
            wanted[title if len(keys) == 1 else f"{title}, {label}"] = (key, unit)
    figures = []
    for title, (key, unit) in wanted.items():
        series: dict[str, list[Point]] = {run.name: points(run.records, key) for run in runs[:COLOURS]}
        if any(y for found in series.values() for _, y in found):
            figures.append(line_chart(title, series, unit=unit))
    more = f'<p class="note">Charts show the first {COLOURS} runs.</p>' if len(runs) > COLOURS else ""
    return f"{more}<section class=charts>{''.join(figures)}</section>"
