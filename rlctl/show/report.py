"""Write `report.html`: a run on one page, made from the files of the run directory. It opens anywhere."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rlctl.show import eval_keys
from rlctl.show.charts import Point, chart, drawable, points
from rlctl.show.journal import is_evaluation, last_attempt, newest, read_journal
from rlctl.show.metrics_file import read_metrics
from rlctl.show.report_page import header, note, page, section, table
from rlctl.show.report_samples import sample_sections
from rlctl.show.text_format import TIMES, count, counted, duration, html, number, phase_times, replicas, share
from specs.errors import RunDirError
from specs.json_file import read_or_empty
from specs.schema.roles import ROLES

Records = Sequence[dict[str, Any]]


def _of_learners(metric: str) -> dict[str, str]:
    """Return the key of a metric that every learning role has, by role."""
    return {role.name: f"{role.name}/{metric}" for role in ROLES.values() if role.holds == "learner"}


# Charts of one metric each: title, unit, label → key of metrics.jsonl.
CHARTS: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("Loss", "", {**_of_learners("loss"), "reward_model": "reward_model/loss"}),
    ("Token accuracy", "share", {"likeliest": "actor/token_accuracy"}),
    ("Reward margin", "", {"actor": "actor/reward_margin", "reward model": "reward_model/margin"}),
    ("Implicit rewards", "", {"chosen": "actor/chosen_reward", "rejected": "actor/rejected_reward"}),
    ("Scores", "", {"chosen": "reward_model/chosen_score", "rejected": "reward_model/rejected_score"}),
    ("Entropy", "nats per token", _of_learners("entropy")),
    ("KL", "nats per token", {"to the reference": "actor/kl", "to the sampling policy": "actor/approx_kl"}),
    ("Clipped tokens", "share", _of_learners("clip_fraction")),
    ("Sampler against trainer", "|Δ log-prob|", {"mean": "rollout/logprob_gap", "probe": "sync/probe_gap"}),
    ("Staleness", "steps", {"mean": "rollout/staleness_mean", "largest": "rollout/staleness_max"}),
    ("Gradient norm", "before clipping", {**_of_learners("grad_norm"), "reward_model": "reward_model/grad_norm"}),
    ("Learning rate", "", {**_of_learners("lr"), "reward_model": "reward_model/lr"}),
    ("Finished completions", "share that ends by itself", {"finished": "rollout/finished"}),
    ("Completion length", "tokens", {"mean": "rollout/length_mean"}),
    ("Throughput", "tokens/s", {"prompt and completion": "perf/tokens_per_s"}),
    ("Weight sync", "GB/s", {"actor → rollout": "sync/GB_per_s"}),
)
FILES = (
    *("spec.toml", "resolved.json", "as_built.json", "memory.json", "metrics.jsonl", "samples.jsonl"),
    *("eval.jsonl", "reward_failures.jsonl", "journal.jsonl", "checkpoints", "logs"),
)
REFRESH_S = 15  # between two loads of the page of a running run
WARNINGS_SHOWN = 50


def render(run_dir: Path, *, running: bool = False, target: Path | None = None) -> str:
    """Return the page as text; files that are missing leave their part out. `target`: where it will be, for its links;
    else the run directory. `running`: a run writes it again there, so that it loads itself again."""
    run_dir = run_dir.absolute()
    folder = target.absolute().parent if target else run_dir
    trouble = ""
    try:
        records: Records = read_metrics(run_dir / "metrics.jsonl")
    except RunDirError as error:
        records, trouble = [], note(error.message)
    resolved = read_or_empty(newest(run_dir, "resolved"))
    run = _table(resolved.get("run"))
    title = str(run.get("name", run_dir.name))
    journal = read_journal(run_dir)
    parts = [
        header(title, {name: run_dir / name for name in FILES}, folder),
        trouble,
        _state(journal, records, running),
        _summary(records, None if is_evaluation(journal) else run.get("steps")),
        _warnings(journal),
        _charts(records, _term_names(resolved)),
        sample_sections(run_dir / "samples.jsonl", "Samples"),
        sample_sections(run_dir / "eval.jsonl", "Evaluation"),
        _as_built(read_or_empty(run_dir / "as_built.json")),
        _memory(read_or_empty(run_dir / "memory.json"), records),
        _attempts(journal, read_or_empty(run_dir / "forked_from.json")),
    ]
    return page(title, "".join(parts), refresh_s=REFRESH_S if running and folder == run_dir else 0)


# ── parts of the page ─────────────────────────────────────────────────────────────────────────────


def _state(journal: Records, records: Records, running: bool) -> str:
    """Say how the newest attempt ended, where that is not well."""
    last = last_attempt(journal)
    step = max((record["step"] for record in records), default=0)
    if running:
        return f'<p class="state">Running: {counted(step, "step")} done; written {time.strftime("%H:%M:%S")}.</p>'
    if not last or last.get("outcome") == "done":
        return ""
    if last["event"] == "start":
        headline = f"Ended after step {step} without a word: it was killed, or its host went away."
        again = "Evaluate again" if is_evaluation(journal) else "rlctl train RUN_DIR --resume continues it"
        body = f"<p>{again}.</p>"
    else:
        headline = f"{'Interrupted' if last.get('outcome') == 'interrupted' else 'Failed'} after step {step}"
        hint = f"<p>{html(last['hint'])}</p>" if last.get("hint") else ""
        body = f"<pre>{html(last.get('error', ''))}</pre>{hint}"
    return f"<section class=failed><h2>{headline}</h2>{body}</section>"


def _warnings(journal: Records) -> str:
    warnings = [line for line in journal if line["event"] == "warning"]
    rows = "".join(
        f"<li>{html(line.get('text', ''))} <small>attempt {html(line.get('attempt', ''))}</small></li>"
        for line in warnings[-WARNINGS_SHOWN:]
    )
    return section(counted(len(warnings), "warning"), f"<ul class=warnings>{rows}</ul>") if warnings else ""


def _attempts(journal: Records, fork: dict[str, Any]) -> str:
    """List when each attempt began and how it ended."""
    starts = [line for line in journal if line["event"] == "start"]
    if len(starts) < 2 and not fork:
        return ""
    ends = {line.get("attempt"): line for line in journal if line["event"] == "end"}
    rows = []
    for line in starts:
        end = ends.get(line.get("attempt"), {})
        began = time.strftime("%Y-%m-%d %H:%M", time.localtime(drawable(line.get("time")) or 0))
        overrides = line.get("overrides")
        changed = ", ".join(map(str, overrides)) if isinstance(overrides, list) else ""
        rows.append((line.get("attempt"), began, end.get("outcome", "unknown"), end.get("error", ""), changed))
    origin = f"<p>Forked from {html(fork.get('run'))} at step {html(fork.get('step'))}.</p>" if fork else ""
    return section("Attempts", origin + table(("attempt", "began", "end", "why", "--set"), rows))


def _summary(records: Records, planned: object) -> str:
    steps = [record for record in records if record["step"] > 0] or records  # `rlctl eval` of a model has none
    if not steps:
        return note("No step has ended yet.")
    spent = sum(drawable(record.get("time/wall_s") or record.get("time/step_s")) or 0.0 for record in steps)
    speed = [y for _, y in points(steps[len(steps) // 2 :], "perf/tokens_per_s")]
    shown = eval_keys.headline(steps)
    tiles = {
        "steps": f"{steps[-1]['step']}" + (f" of {planned}" if planned else ""),
        "training time": duration(spent) if spent else "",
        "mean reward" if shown.word == "reward" else shown.word: _first_and_last(steps, shown.key),
        "tokens per second": count(sum(speed) / len(speed)) if speed else "",
    }
    tiles |= {heading: _first_and_last(records, key) for heading, key in eval_keys.keys(records).items()}
    tiles["completions finished"] = _first_and_last(steps, "rollout/finished", share)
    if failed := sum(map(_failures, steps)):
        tiles["failed grades"] = count(failed)
    counts = [*(y for _, y in points(steps, "rollout/restarts")), 0]
    if restarts := sum(before for before, after in itertools.pairwise(counts) if after < before):  # each attempt's last
        tiles["sampler restarts"] = count(restarts)
    if fewer := next((found for record in reversed(steps) if (found := replicas(record))), ""):
        tiles["samplers"] = replicas(steps[-1]) or f"all, at times {fewer}"
    if syncs := [record["sync/verified"] for record in steps if "sync/verified" in record]:
        tiles["verified syncs"] = f"{sum(map(bool, syncs))} of {len(syncs)}"
    cells = "".join(f"<div><dt>{html(label)}</dt><dd>{html(text)}</dd></div>" for label, text in tiles.items() if text)
    return f'<dl class="tiles">{cells}</dl>'


def _first_and_last(records: Records, key: str, write: Callable[[float], str] = number) -> str:
    values = [y for _, y in points(records, key)]
    return " → ".join(map(write, (values[0], values[-1]) if len(values) > 1 else values))


def _failures(record: dict[str, Any]) -> float:
    return sum(drawable(value) or 0.0 for key, value in record.items() if key.startswith("reward/failed_"))


def _term_names(resolved: dict[str, Any]) -> dict[str, str]:
    """Return what each term of the reward is called, by the metric of its mean."""
    terms = _table(resolved.get("reward")).get("terms")
    if not isinstance(terms, list):
        return {}
    return {f"term_{i}": f"{i} {_table(term).get('path') or _table(term).get('kind')}" for i, term in enumerate(terms)}


def _charts(records: Records, terms: dict[str, str]) -> str:
    sets = eval_keys.by_set({key: points(records, key) for key in dict.fromkeys(itertools.chain(*records))})
    shown = eval_keys.headline(records)
    main = {"train": points(records, shown.key)}
    main |= {f"eval {name}": series[shown.metric] for name, series in sets.items() if shown.metric in series}
    figures = [
        chart(shown.word.capitalize(), main),
        chart("Reward spread", {"all completions": points(records, "reward/std")}, unit="standard deviation"),
        _terms_chart("Terms of the reward", {term: points(records, f"reward/{term}") for term in terms}, terms),
    ]
    for name, series in sets.items():
        for metric in [metric for metric in eval_keys.BESIDES if metric in series and metric != shown.metric]:
            figures.append(chart(f"{metric.replace('_', ' ').capitalize()}, eval {name}", {metric: series[metric]}))
        solved = {metric: series[metric] for metric in eval_keys.solved(series)}
        figures.append(chart(f"Solved, eval {name}", solved, unit="share of prompts"))
        figures.append(_terms_chart(f"Terms, eval {name}", series, terms))
    wasted = {"groups": "reward/silent_groups", "completions that repeat another": "rollout/repeated"}
    silent = _nonzero({label: points(records, key) for label, key in wasted.items()})
    figures.append(chart("Without signal", silent, unit="share: groups of one score, equal completions"))
    failed = {"completions": [(record["step"], _failures(record)) for record in records if record["step"] > 0]}
    figures.append(chart("Failed grades", _nonzero(failed), unit="completions"))
    figures.append(_time_chart(records))
    for title, unit, keys in CHARTS:
        found = {label: points(records, key) for label, key in keys.items()}
        figures.append(chart(title, _nonzero(found), unit=unit))
    held = (key for key in itertools.chain(*records) if key.startswith("mem/") and "_before_" not in key)
    memory = {key[len("mem/") : -len("_GiB")].replace("_", " "): points(records, key) for key in dict.fromkeys(held)}
    figures.append(chart("Memory", memory, unit="GiB"))
    return f"<section class=charts>{''.join(figures)}</section>"


def _terms_chart(title: str, series: dict[str, list[Point]], terms: dict[str, str]) -> str:
    """Draw the terms of the reward, where there are several."""
    named = {label: series[term] for term, label in terms.items() if term in series}
    return chart(title, named) if len(named) > 1 else ""


def _nonzero(series: dict[str, list[Point]]) -> dict[str, list[Point]]:
    """Drop series that are always 0."""
    return {name: found for name, found in series.items() if any(y for _, y in found)}


def _time_chart(records: Records) -> str:
    """Draw the seconds per step, by phase; the rest is `other`."""
    steps = [record for record in records if drawable(record.get("time/step_s"))]
    names = dict.fromkeys(name for record in steps for name in phase_times(record))
    order = [*TIMES.values(), *names]
    bands: dict[str, list[Point]] = {name: [] for name in (*sorted(names, key=order.index), "other")}
    for record in steps:
        seconds = phase_times(record)
        seconds["other"] = max(0.0, record["time/step_s"] - sum(seconds.values()))
        for name, band in bands.items():
            band.append((record["step"], seconds.get(name, 0.0)))
    return chart("Time per step", _nonzero(bands), unit="s", stacked=True)


def _as_built(reports: dict[str, Any]) -> str:
    """Show what each rank built, below the runs that the models come from."""
    chains = _table(reports.get("lineage"))
    origin = "".join(f"<p>{html(role)}: {html(' ← '.join(map(str, chain)))}</p>" for role, chain in chains.items())
    ranks = [_table(rank) for own in reports.values() if isinstance(own, list) for rank in own]
    headings = ("role", "rank", "engine", "device", "model", "parameters", "dtype", "attention", "versions")
    return section("As built", origin + table(headings, [_built_row(rank) for rank in ranks])) if reports else ""


def _built_row(rank: dict[str, Any]) -> tuple[object, ...]:
    model, threads = _table(rank.get("model")), rank.get("threads")
    device = f"{rank.get('device', '')}" + (f", {counted(threads, 'thread')}" if isinstance(threads, int) else "")
    versions = ", ".join(f"{name} {version}" for name, version in _table(rank.get("versions")).items())
    name, dtype, attention = (model.get(key, "–") for key in ("model_class", "dtype", "attn_implementation"))
    place = f"{rank.get('rank')} of {rank.get('world_size')}"
    size = count(drawable(model.get("parameters")))
    return rank.get("role"), place, rank.get("engine", ""), device, name, size, dtype, attention, versions


def _memory(compared: dict[str, Any], records: Records) -> str:
    """Compare what `rlctl plan` says of each role with the most that one of its ranks held, and with the chart's peak,
    which counts what the process held before it built its model."""
    rows = []
    for role, sizes in compared.items():
        planned, used = (drawable(_table(sizes).get(key)) for key in ("planned_GiB", "used_GiB"))
        if planned is None or used is None:
            continue
        off = f"{planned / used - 1:+.0%}" if used else "–"
        peaks = [y for _, y in points(records, f"mem/{role}_peak_GiB")]
        rows.append((role, number(planned), number(used), off, number(max(peaks)) if peaks else "–"))
    headings = (
        *("role", "planned GiB", "held at most, GiB", "plan was off by"),
        "with what the process held before its model, as in the chart",
    )
    return section("Memory of a rank", table(headings, rows)) if compared else ""


# ── reading ───────────────────────────────────────────────────────────────────────────────────────


def _table(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
