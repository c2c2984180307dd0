"""Format numbers, series and foreign text as short text, for the panel, the report and the quickstart."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, TypeVar

from specs.phases import GRADING_METRIC, TIME_METRICS
from specs.terminal import visible

T = TypeVar("T")
BLOCKS = "▁▂▃▄▅▆▇█"
FEW_FINISH = 0.1  # share of completions that end by themselves below which what is shown is mostly truncated
# Times of a step's phases, in its order: the metric, and what a person reads.
TIMES = {TIME_METRICS["rollout"]: "rollout", GRADING_METRIC: "reward"}
TIMES |= {metric: phase for phase, metric in TIME_METRICS.items()}


def sparkline(values: Sequence[float | None], width: int) -> str:
    """Draw a line of at most `width` blocks, lowest value to highest; longer series are averaged into buckets."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    if not known or width < 1:
        return ""
    points = [statistics.fmean(bucket) for bucket in buckets(known, width)]
    low, high = min(points), max(points)
    span = high - low
    top = len(BLOCKS) - 1
    return "".join(BLOCKS[round((point - low) / span * top) if span > 0 else 0] for point in points)


def buckets(values: Sequence[T], most: int) -> list[Sequence[T]]:
    """Divide a series into at most so many buckets of equal size."""
    count = min(most, len(values))
    edges = [len(values) * i // count for i in range(count + 1)]
    return [values[a:b] for a, b in itertools.pairwise(edges)]


def number(value: float | int | None, digits: int = 3) -> str:
    """Write `digits` significant digits, short: 0.731, -0.00124, 1.2e-06, 12. A missing value is a dash."""
    if value is None or not math.isfinite(value):
        return "–"
    if value == int(value) and abs(value) < 10**digits:
        return str(int(value))
    size = abs(value)
    if size >= 1e6 or size < 1e-4:
        return f"{value:.{digits - 1}e}"
    decimals = max(0, digits - 1 - math.floor(math.log10(size)))
    return f"{value:.{min(decimals, digits + 2)}f}"


def share(value: float) -> str:
    """Write a share as a percentage that is 0 % or 100 % only where it is none or all: 98%, 1.5%, 99.95%."""
    percent = 100 * value
    if percent in (0, 100):
        return f"{percent:.0f}%"
    near = min(percent, 100 - percent)  # as many digits as the smaller part needs
    return f"{percent:.{0 if near >= 9.5 else 1 if near >= 0.05 else 2}f}%"


def count(value: float | None) -> str:
    """Write a large count: 950, 12.4k, 3.1M."""
    if value is None or not math.isfinite(value):
        return "–"
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.1f}{unit}"
    return f"{value:.0f}"


def html(text: object) -> str:
    """Escape text for a page, also within an attribute: nothing in it is a tag, and what would command a terminal or
    turn the direction around is visible."""
    return escape(visible(str(text)))


def counted(things: int, noun: str) -> str:
    """Write 1 step, 2 steps."""
    return f"{things} {noun}" if things == 1 else f"{things} {noun}s"


def duration(seconds: float | None) -> str:
    """Write 0:42, 12:07, 3:12:07, 2d 03:12."""
    if seconds is None or not math.isfinite(seconds):
        return "–"
    total = max(0, round(seconds))
    days, rest = divmod(total, 86400)
    hours, rest = divmod(rest, 3600)
    minutes, left = divmod(rest, 60)
    if days:
        return f"{days}d {hours:02d}:{minutes:02d}"
    return f"{hours}:{minutes:02d}:{left:02d}" if hours else f"{minutes}:{left:02d}"


# A step as a whole, what many episodes spend at the same time, and what is part of phases.
_NO_PHASE = ("time/step_s", "time/wall_s", "time/environment_s", "time/driver_s", "time/restart_s")


def phase_times(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the seconds of each phase of a step; of a metric `time/…_s` that no phase owns, by its own name."""
    times = {key: value for key, value in record.items() if key.startswith("time/") and key.endswith("_s")}
    return {
        TIMES.get(key, key.removeprefix("time/").removesuffix("_s")): float(value)
        for key, value in times.items()
        if key not in _NO_PHASE and isinstance(value, int | float)
    }


def time_shares(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Divide `time/step_s` by phase, in the order of the step, `other` last. Phases that overlap are scaled to 1."""
    totals: dict[str, float] = {}
    for record in records:
        for name, seconds in phase_times(record).items():
            totals[name] = totals.get(name, 0.0) + seconds
    step = sum(record.get("time/step_s") or 0.0 for record in records)
    known = {name: totals.pop(name) for name in TIMES.values() if name in totals} | totals
    whole = max(step, sum(known.values()))
    if whole <= 0:
        return {}
    shares = {name: value / whole for name, value in known.items()}
    return {**shares, "other": max(0.0, 1.0 - sum(shares.values()))}


def replicas(record: Mapping[str, Any]) -> str:
    """Say which replicas of the rollout took part in a step, where some did not: 2 of 3 replicas. Else empty."""
    here, *absent = (record.get(f"rollout/{name}", 0) for name in ("replicas", "late", "dropped"))
    if not all(isinstance(number, int) for number in (here, *absent)) or not any(absent) or not here:
        return ""
    return f"{here} of {here + sum(absent)} replicas"


def of_steps(step: int, steps: object) -> str:
    """Write `3/6`; of a run beyond its `run.steps`, which were lowered since, `9/9`; where none are known, `3`."""
    return f"{step}/{max(step, steps)}" if isinstance(steps, int) else str(step)


def columns(head: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 0) -> str:
    """Align cells below each other, to the right but for the first `left` columns; none is cut, however narrow the
    terminal."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    signs = ["<" if index < left else ">" for index in range(len(widths))]
    lines = (zip(row, signs, widths, strict=True) for row in (head, *rows))
    return "\n".join("  ".join(f"{cell:{sign}{width}}" for cell, sign, width in line).rstrip() for line in lines)
