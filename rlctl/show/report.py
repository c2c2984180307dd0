"""`report.html`: the run on one page, made from the files of the run directory. Self-contained: it opens anywhere."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rlctl.show.charts import Point, line_chart, stacked_chart
from rlctl.show.metrics_file import read_metrics, read_samples
from rlctl.show.report_style import STYLE
from rlctl.show.text_format import TIMES, count, duration, html, number, time_name
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
    ("Completions that end by themselves", "share; the others are cut off", {"finished": "rollout/finished"}),
    ("Completion length", "tokens", {"mean": "rollout/length_mean"}),
    ("Throughput", "tokens/s", {"prompt and completion": "perf/tokens_per_s"}),
    ("Weight sync", "GB/s", {"actor → rollout": "sync/GB_per_s"}),
)
FILES = (
    *("spec.toml", "resolved.json", "as_built.json", "memory.json", "metrics.jsonl", "samples.jsonl"),
    *("checkpoints", "logs"),
)
# A second lock behind `html`: should markup ever get through, the browser runs and fetches nothing.
NO_SCRIPTS = (
    '<meta http-equiv="Content-Security-Policy" '
    "content=\"default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'\">"
)
SAMPLES_SHOWN = 12
ENDS = {True: "finished", False: "truncated"}
_LARGEST = 1e300  # of a number: sums and spans of these are numbers, too
TEXT_SHOWN = 600  # characters of a prompt or a completion


def write_report(run_dir: Path) -> Path | None:
    """(Re)write `run_dir/report.html` atomically; files that are missing leave their part out.

    Returns its path, or None where the disk refuses: the report is made again on the next occasion, and the
    error that a person must see is the run's own.
    """
    target, partial = run_dir / "report.html", run_dir / "report.html.partial"
    try:
        partial.write_text(render(run_dir), encoding="utf-8", errors="replace")  # JSON may hold half a surrogate pair
        os.replace(partial, target)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        return None
    return target


def render(run_dir: Path) -> str:
    """The page as text."""
    note = ""
    try:
        records: Records = read_metrics(run_dir / "metrics.jsonl")
    except RunDirError as error:
        records, note = [], f'<p class="note">{html(error.message)}</p>'
    run = _table(_read_json(run_dir / "resolved.json").get("run"))
    title = html(run.get("name", run_dir.name))
    parts = [
        f"<header><h1>{title}</h1>{_links(run_dir)}</header>{note}",
        _summary(records, run),
        _charts(records),
        _as_built(_read_json(run_dir / "as_built.json")),
        _memory(_read_json(run_dir / "memory.json")),
        _samples(run_dir / "samples.jsonl"),
    ]
    head = f'<meta charset="utf-8">{NO_SCRIPTS}<meta name="viewport" content="width=device-width">'
    head += f"<title>{title} · rlctl</title>"
    return (
        f"<!doctype html><html lang=en><head>{head}<style>{STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )


# ── parts of the page ─────────────────────────────────────────────────────────────────────────────


def _links(run_dir: Path) -> str:
    links = [f'<a href="{name}">{name}</a>' for name in FILES if (run_dir / name).exists()]
    return f"<nav>{' · '.join(links)}</nav>"


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
    for name, series in _evals(records).items():
        tiles[f"eval {name}"] = f"{number(series[0][1])} → {number(series[-1][1])}"
    syncs = [record["sync/verified"] for record in steps if "sync/verified" in record]
    if syncs:
        tiles["verified syncs"] = f"{sum(map(bool, syncs))} of {len(syncs)}"
    cells = "".join(f"<div><dt>{html(label)}</dt><dd>{html(text)}</dd></div>" for label, text in tiles.items())
    return f'<dl class="tiles">{cells}</dl>'


def _charts(records: Records) -> str:
    reward = {"train": points(records, "reward/mean")} | {f"eval {n}": s for n, s in _evals(records).items()}
    figures = [line_chart("Reward", reward), _time_chart(records)]
    for title, unit, keys in CHARTS:
        series = {label: points(records, key) for label, key in keys.items()}
        figures.append(line_chart(title, {n: s for n, s in series.items() if any(y for _, y in s)}, unit=unit))
    memory = {
        key[len("mem/") : -len("_GiB")].replace("_", " "): key
        for record in records
        for key in record
        if key.startswith("mem/") and "_before_" not in key
    }
    figures.append(line_chart("Memory", {n: points(records, key) for n, key in memory.items()}, unit="GiB"))
    return f"<section class=charts>{''.join(figures)}</section>"


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
    return stacked_chart("Time per step", bands, unit="s")


COLUMNS: tuple[tuple[str, Callable[[dict[str, Any], dict[str, Any]], str]], ...] = (
    ("role", lambda rank, model: str(rank.get("role"))),
    ("rank", lambda rank, model: f"{rank.get('rank')} of {rank.get('world_size')}"),
    ("engine", lambda rank, model: str(rank.get("engine", ""))),
    ("device", lambda rank, model: f"{rank.get('device', '')}, {rank.get('threads')} threads"),
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


def _memory(compared: dict[str, Any]) -> str:
    """What `rlctl plan` says of each role against the most that one of its ranks held."""
    if not compared:
        return ""
    rows = []
    for role, sizes in compared.items():
        planned, used = (_number(_table(sizes), key) for key in ("planned_GiB", "used_GiB"))
        if planned is None or used is None:
            continue
        off = f"{planned / used - 1:+.0%}" if used else "–"
        cells = (role, number(planned), number(used), off)
        rows.append(f"<tr>{''.join(f'<td>{html(cell)}</td>' for cell in cells)}</tr>")
    head = "<tr><th>role</th><th>planned GiB</th><th>held at most, GiB</th><th>plan was off by</th></tr>"
    return f"<section><h2>Memory of a rank</h2><div class=wide><table>{head}{''.join(rows)}</table></div></section>"


def _samples(path: Path) -> str:
    try:
        samples = read_samples(path)
    except RunDirError as error:
        return f'<p class="note">{html(error.message)}</p>'
    if not samples:
        return ""
    keep = samples if len(samples) <= SAMPLES_SHOWN else [*samples[:4], *samples[4 - SAMPLES_SHOWN :]]
    rows = []
    for sample in keep:
        written = sample.get("completion_raw", sample.get("completion"))
        texts = "".join(f"<td><pre>{html(_cut(text))}</pre></td>" for text in (sample.get("prompt"), written))
        texts += f"<td>{ENDS[sample['finished'] is True] if 'finished' in sample else '–'}</td>"
        texts += f"<td><pre>{html(_cut(sample.get('answer')))}</pre></td>"
        reward = sample.get("reward")
        score = number(_number(sample, "reward")) if isinstance(reward, int | float | None) else html(reward)
        rows.append(f"<tr><td>{html(sample.get('step', ''))}</td>{texts}<td>{score}</td></tr>")
    head = "<tr><th>step</th><th>prompt</th><th>completion</th><th>end</th><th>answer</th><th>reward</th></tr>"
    return (
        f"<section><h2>Samples, first and last</h2><div class=wide><table>{head}{''.join(rows)}</table></div></section>"
    )


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


def _evals(records: Records) -> dict[str, list[Point]]:
    keys = dict.fromkeys(key for record in records for key in record if key.startswith("eval/"))
    series = {key.split("/")[1]: points(records, key) for key in keys if key.endswith("/reward_mean")}
    return {name: found for name, found in series.items() if found}


def _mean(series: Sequence[Point]) -> float | None:
    return sum(y for _, y in series) / len(series) if series else None


def _cut(text: Any) -> str:
    shown = "" if text is None else str(text)
    return shown if len(shown) <= TEXT_SHOWN else shown[:TEXT_SHOWN] + " …"


def _read_json(path: Path) -> dict[str, Any]:
    """Empty where it cannot be read."""
    try:
        return read_object(path)
    except ValueError:
        return {}
