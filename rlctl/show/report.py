"""`report.html`: the run on one page, made from the files of the run directory. Self-contained: it opens anywhere."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rlctl.show import eval_keys
from rlctl.show.charts import Point, line_chart, stacked_chart
from rlctl.show.journal import read_journal
from rlctl.show.metrics_file import read_metrics
from rlctl.show.report_samples import evaluation_sections, samples_section
from rlctl.show.report_script import link, page
from rlctl.show.report_style import STYLE
from rlctl.show.text_format import TIMES, count, counted, duration, html, number, replicas, share, time_name
from specs.errors import RunDirError
from specs.json_file import read_object
from specs.schema.roles import ROLES

Records = Sequence[dict[str, Any]]


def _of_learners(metric: str) -> dict[str, str]:
    """Role → its key of a metric that every role which learns has."""
    return {role.name: f"{role.metrics}{metric}" for role in ROLES.values() if role.learns}


# Charts of one metric each: title, unit, label → key of metrics.jsonl.
CHARTS: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("Loss", "", _of_learners("loss")),
    ("Entropy", "nats per token", _of_learners("entropy")),
    ("KL", "nats per token", {"to the reference": "actor/kl", "to the sampling policy": "actor/approx_kl"}),
    ("Clipped tokens", "share", _of_learners("clip_fraction")),
    ("Sampler against trainer", "|Δ log-prob|", {"mean": "rollout/logprob_gap", "probe": "sync/probe_gap"}),
    ("Staleness", "steps", {"mean": "rollout/staleness_mean", "largest": "rollout/staleness_max"}),
    ("Gradient norm", "before clipping", _of_learners("grad_norm")),
    ("Learning rate", "", _of_learners("lr")),
    ("Finished completions", "share that ends by itself", {"finished": "rollout/finished"}),
    ("Completion length", "tokens", {"mean": "rollout/length_mean"}),
    ("Throughput", "tokens/s", {"prompt and completion": "perf/tokens_per_s"}),
    ("Weight sync", "GB/s", {"actor → rollout": "sync/GB_per_s"}),
)
FILES = (
    *("spec.toml", "resolved.json", "as_built.json", "memory.json", "metrics.jsonl", "samples.jsonl"),
    *("eval.jsonl", "reward_failures.jsonl", "journal.jsonl", "checkpoints", "logs"),
)
REFRESH_S = 15  # of a page whose run goes on
WARNINGS_SHOWN = 50
_LARGEST = 1e300  # of a number: sums and spans of these are numbers, too


def write_report(run_dir: Path, *, running: bool = False, target: Path | None = None) -> Path | None:
    """(Re)write `target`, or `run_dir/report.html`, atomically; files that are missing leave their part out. `running`:
    an attempt goes on; it writes `run_dir/report.html` again, so that page loads itself again.

    Returns its path, or None where the disk refuses: the report is made again on the next occasion, and the
    error that a person must see is the run's own.
    """
    target = target or run_dir / "report.html"
    return target if write_page(target, render(run_dir, running=running, target=target)) else None


def write_page(target: Path, text: str) -> bool:
    """Whether the disk took it."""
    partial = target.with_name(target.name + ".partial")
    try:
        partial.write_text(text, encoding="utf-8", errors="replace")  # JSON may hold half a surrogate pair
        os.replace(partial, target)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        return False
    return True


def render(run_dir: Path, *, running: bool = False, target: Path | None = None) -> str:
    """The page as text. `target`: where it will be, for its links; else the run directory."""
    folder = (target.parent if target else run_dir).absolute()
    note = ""
    try:
        records: Records = read_metrics(run_dir / "metrics.jsonl")
    except RunDirError as error:
        records, note = [], f'<p class="note">{html(error.message)}</p>'
    resolved = _read_json(run_dir / "resolved.json")
    run = _table(resolved.get("run"))
    title = html(run.get("name", run_dir.name))
    journal = read_journal(run_dir)
    parts = [
        f"<header><h1>{title}</h1>{_links(run_dir, folder)}</header>{note}",
        _state(journal, records, running),
        _summary(records, run),
        _warnings(journal),
        _charts(records, _term_names(resolved)),
        samples_section(run_dir / "samples.jsonl"),
        *evaluation_sections(run_dir / "eval.jsonl"),
        _as_built(_read_json(run_dir / "as_built.json")),
        _memory(_read_json(run_dir / "memory.json"), records),
        _attempts(journal, _read_json(run_dir / "forked_from.json")),
    ]
    return page(title, STYLE, "".join(parts), refresh_s=REFRESH_S if running and folder == run_dir.absolute() else 0)


# ── parts of the page ─────────────────────────────────────────────────────────────────────────────


def _links(run_dir: Path, folder: Path) -> str:
    files = {name: run_dir.absolute() / name for name in FILES}
    links = [f'<a href="{link(file, folder)}">{name}</a>' for name, file in files.items() if file.exists()]
    return f"<nav>{' · '.join(links)}</nav>"


def _state(journal: Records, records: Records, running: bool) -> str:
    """How the newest attempt ended, where that is not well."""
    last = next((line for line in reversed(journal) if line["event"] in ("start", "end")), None)
    step = max((record["step"] for record in records), default=0)
    if running:
        return f'<p class="state">Running: {counted(step, "step")} done; written {time.strftime("%H:%M:%S")}.</p>'
    if last is None or last.get("outcome") == "done":
        return ""
    if last["event"] == "start":
        said = f"Ended after step {step} without a word: it was killed, or its host went away."
        return f"<section class=failed><h2>{said}</h2><p>rlctl train RUN_DIR --resume goes on.</p></section>"
    outcome = "Interrupted" if last.get("outcome") == "interrupted" else "Failed"
    hint = f"<p>{html(last['hint'])}</p>" if last.get("hint") else ""
    said = f"<pre>{html(last.get('error', ''))}</pre>"
    return f"<section class=failed><h2>{outcome} after step {step}</h2>{said}{hint}</section>"


def _warnings(journal: Records) -> str:
    told = [line for line in journal if line["event"] == "warning"]
    if not told:
        return ""
    rows = "".join(
        f"<li>{html(line.get('text', ''))} <small>attempt {html(line.get('attempt', ''))}</small></li>"
        for line in told[-WARNINGS_SHOWN:]
    )
    return f"<section><h2>{counted(len(told), 'warning')}</h2><ul class=warnings>{rows}</ul></section>"


def _attempts(journal: Records, fork: dict[str, Any]) -> str:
    """When each attempt began and how it ended."""
    starts = [line for line in journal if line["event"] == "start"]
    if len(starts) < 2 and not fork:
        return ""
    ends = {line.get("attempt"): line for line in journal if line["event"] == "end"}
    rows = []
    for line in starts:
        end = ends.get(line.get("attempt"), {})
        began = time.strftime("%Y-%m-%d %H:%M", time.localtime(_number(line, "time") or 0))
        overrides = line.get("overrides")
        changed = ", ".join(map(str, overrides)) if isinstance(overrides, list) else ""
        cells = (line.get("attempt"), began, end.get("outcome", "no word of its end"), end.get("error", ""), changed)
        rows.append(f"<tr>{''.join(f'<td>{html(cell)}</td>' for cell in cells)}</tr>")
    head = "".join(f"<th>{name}</th>" for name in ("attempt", "began", "end", "why", "--set"))
    origin = f"<p>Forked from {html(fork.get('run'))} at step {html(fork.get('step'))}.</p>" if fork else ""
    table = f"<div class=wide><table><tr>{head}</tr>{''.join(rows)}</table></div>"
    return f"<section><h2>Attempts</h2>{origin}{table}</section>"


def _summary(records: Records, run: dict[str, Any]) -> str:
    steps = [record for record in records if record["step"] > 0]
    if not steps:
        return '<p class="note">No step has ended yet.</p>'
    rewards = [y for _, y in points(steps, "reward/mean")]
    spent = sum(_number(record, "time/wall_s") or _number(record, "time/step_s") or 0.0 for record in steps)
    planned = run.get("steps")
    tiles = {
        "steps": f"{steps[-1]['step']}" + (f" of {planned}" if planned else ""),
        "training time": duration(spent),
        "mean reward": f"{number(rewards[0])} → {number(rewards[-1])}" if rewards else "–",
        "tokens per second": count(_mean(points(steps[len(steps) // 2 :], "perf/tokens_per_s"))),
    }
    for heading, key in eval_keys.keys(records).items():
        if series := points(records, key):
            tiles[heading] = f"{number(series[0][1])} → {number(series[-1][1])}"
    finished = points(steps, "rollout/finished")
    if finished:
        tiles["completions finished"] = f"{share(finished[0][1])} → {share(finished[-1][1])}"
    failed = sum(_failures(record) for record in steps)
    if failed:
        tiles["failed grades"] = count(failed)
    restarts = max((_number(record, "rollout/restarts") or 0 for record in steps), default=0)
    if restarts:
        tiles["sampler restarts"] = count(restarts)
    if fewer := next((found for record in reversed(steps) if (found := replicas(record))), ""):
        tiles["samplers"] = replicas(steps[-1]) or f"all, at times {fewer}"
    syncs = [record["sync/verified"] for record in steps if "sync/verified" in record]
    if syncs:
        tiles["verified syncs"] = f"{sum(map(bool, syncs))} of {len(syncs)}"
    cells = "".join(f"<div><dt>{html(label)}</dt><dd>{html(text)}</dd></div>" for label, text in tiles.items())
    return f'<dl class="tiles">{cells}</dl>'


def _failures(record: dict[str, Any]) -> float:
    return sum(_number(record, key) or 0.0 for key in record if key.startswith("reward/failed_"))


def _term_names(resolved: dict[str, Any]) -> dict[str, str]:
    """Metric of a term's mean → what the term is called."""
    terms = _table(resolved.get("reward")).get("terms")
    if not isinstance(terms, list):
        return {}
    return {f"term_{i}": f"{i} {_table(term).get('path') or _table(term).get('kind')}" for i, term in enumerate(terms)}


def _charts(records: Records, terms: dict[str, str]) -> str:
    sets = _eval_metrics(records)
    reward = {"train": points(records, "reward/mean")}
    reward |= {f"eval {name}": series[eval_keys.MEAN] for name, series in sets.items()}
    spread = {"all completions": points(records, "reward/std")}
    means = {label: points(records, f"reward/{term}") for term, label in terms.items()}
    silent = {"groups": points(records, "reward/silent_groups")}
    failed = {"completions": [(record["step"], _failures(record)) for record in records if record["step"] > 0]}
    figures = [line_chart("Reward", reward), line_chart("Reward spread", spread, unit="standard deviation")]
    figures.append(line_chart("Terms of the reward", means) if len(means) > 1 else "")
    for name, series in sets.items():
        scores = {label: series[term] for term, label in terms.items() if term in series}
        solved = {metric: series[metric] for metric in eval_keys.solved(series)}
        figures.append(line_chart(f"Solved, eval {name}", solved, unit="share of prompts"))
        figures.append(line_chart(f"Terms, eval {name}", scores) if len(scores) > 1 else "")
    figures.append(line_chart("Groups without signal", _any(silent), unit="share whose scores are all equal"))
    figures.append(line_chart("Failed grades", _any(failed), unit="completions"))
    figures.append(_time_chart(records))
    for title, unit, keys in CHARTS:
        series = {label: points(records, key) for label, key in keys.items()}
        figures.append(line_chart(title, _any(series), unit=unit))
    memory = {
        key[len("mem/") : -len("_GiB")].replace("_", " "): key
        for record in records
        for key in record
        if key.startswith("mem/") and "_before_" not in key
    }
    figures.append(line_chart("Memory", {n: points(records, key) for n, key in memory.items()}, unit="GiB"))
    return f"<section class=charts>{''.join(figures)}</section>"


def _any(series: dict[str, list[Point]]) -> dict[str, list[Point]]:
    """Without those that are always 0."""
    return {name: found for name, found in series.items() if any(y for _, y in found)}


def _time_chart(records: Records) -> str:
    """Seconds per step, by phase; the rest is `other`."""
    steps = [record for record in records if _number(record, "time/step_s")]
    found = dict.fromkeys(key for record in steps for key in record if key.startswith("time/"))
    within = [key for key in found if key not in ("time/step_s", "time/wall_s")]
    metrics = sorted(within, key=lambda key: (*TIMES, key).index(key))
    bands: dict[str, list[Point]] = {name: [] for name in (*map(time_name, metrics), "other")}
    for record in steps:
        seconds = {time_name(metric): _number(record, metric) or 0.0 for metric in metrics}
        seconds["other"] = max(0.0, (_number(record, "time/step_s") or 0.0) - sum(seconds.values()))
        for name, value in seconds.items():
            bands[name].append((record["step"], value))
    return stacked_chart("Time per step", _any(bands), unit="s")


def _device(rank: dict[str, Any]) -> str:
    threads = rank.get("threads")
    return f"{rank.get('device', '')}" + (f", {counted(threads, 'thread')}" if isinstance(threads, int) else "")


COLUMNS: tuple[tuple[str, Callable[[dict[str, Any], dict[str, Any]], str]], ...] = (
    ("role", lambda rank, model: str(rank.get("role"))),
    ("rank", lambda rank, model: f"{rank.get('rank')} of {rank.get('world_size')}"),
    ("engine", lambda rank, model: str(rank.get("engine", ""))),
    ("device", lambda rank, model: _device(rank)),
    ("model", lambda rank, model: str(model.get("model_class", "–"))),
    ("parameters", lambda rank, model: count(_number(model, "parameters"))),
    ("dtype", lambda rank, model: str(model.get("dtype", "–"))),
    ("attention", lambda rank, model: str(model.get("attn_implementation", "–"))),
    ("versions", lambda rank, model: ", ".join(f"{name} {v}" for name, v in _table(rank.get("versions")).items())),
)


def _as_built(reports: dict[str, Any]) -> str:
    if not reports:
        return ""
    head = "".join(f"<th>{name}</th>" for name, _ in COLUMNS)
    rows = []
    for ranks in (ranks for ranks in reports.values() if isinstance(ranks, list)):
        for rank in map(_table, ranks):
            cells = (html(read(rank, _table(rank.get("model")))) for _, read in COLUMNS)
            rows.append(f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    return f"<section><h2>As built</h2><div class=wide><table><tr>{head}</tr>{''.join(rows)}</table></div></section>"


def _memory(compared: dict[str, Any], records: Records) -> str:
    """What `rlctl plan` says of each role against the most that one of its ranks held; and the chart's peak, which
    counts what the process held before it built its model."""
    if not compared:
        return ""
    rows = []
    for role, sizes in compared.items():
        planned, used = (_number(_table(sizes), key) for key in ("planned_GiB", "used_GiB"))
        if planned is None or used is None:
            continue
        off = f"{planned / used - 1:+.0%}" if used else "–"
        peaks = [y for _, y in points(records, f"mem/{role}_peak_GiB")]
        cells = (role, number(planned), number(used), off, number(max(peaks)) if peaks else "–")
        rows.append(f"<tr>{''.join(f'<td>{html(cell)}</td>' for cell in cells)}</tr>")
    head = "<tr><th>role</th><th>planned GiB</th><th>held at most, GiB</th><th>plan was off by</th>"
    head += "<th>with what the process held before its model, as in the chart</th></tr>"
    return f"<section><h2>Memory of a rank</h2><div class=wide><table>{head}{''.join(rows)}</table></div></section>"


# ── reading ───────────────────────────────────────────────────────────────────────────────────────


def points(records: Records, key: str) -> list[Point]:
    """(step, value) wherever the key has a number that can be drawn."""
    values = ((record["step"], _number(record, key)) for record in records)
    return [(step, value) for step, value in values if value is not None]


def _number(table: dict[str, Any], key: str) -> float | None:
    """A number that a chart can hold, else None."""
    value = table.get(key)
    return float(value) if isinstance(value, int | float) and -_LARGEST < value < _LARGEST else None


def _table(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _eval_metrics(records: Records) -> dict[str, dict[str, list[Point]]]:
    """Evaluation → metric → its values; those with a mean reward."""
    found: dict[str, dict[str, list[Point]]] = {}
    for key in dict.fromkeys(key for record in records for key in record):
        name, metric = eval_keys.split(key)
        if metric and (series := points(records, key)):
            found.setdefault(name, {})[metric] = series
    return {name: series for name, series in found.items() if eval_keys.MEAN in series}


def _mean(series: Sequence[Point]) -> float | None:
    return sum(y for _, y in series) / len(series) if series else None


def _read_json(path: Path) -> dict[str, Any]:
    """Empty where it cannot be read."""
    try:
        return read_object(path)
    except ValueError:
        return {}
