"""Describe charts to the page's script, which draws them: numbers in an attribute, names in a legend beneath."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rlctl.show.text_format import buckets, html, number

Point = tuple[float, float]
Series = Mapping[str, Sequence[Point]]

COLORS = 8  # lines and bands that can be told apart
MAX_POINTS = 300  # a longer series is averaged into that many buckets
LARGEST = 1e300  # sums and spans of numbers below it are numbers, too


def drawable(value: object) -> float | None:
    """Return a number that a chart can hold, else None."""
    return float(value) if isinstance(value, int | float) and -LARGEST < value < LARGEST else None


def points(records: Iterable[Mapping[str, Any]], key: str) -> list[Point]:
    """Return (step, value) wherever the key has a number that can be drawn."""
    values = ((record["step"], drawable(record.get(key))) for record in records)
    return [(step, value) for step, value in values if value is not None]


def chart(title: str, series: Series, *, unit: str = "", stacked: bool = False) -> str:
    """Return one figure; an empty string when no series has a point. Points ascend in step. `stacked`: bands on top of
    each other, whose series have the same steps."""
    drawn = {name: own for name, own in series.items() if own}
    if not drawn:
        return ""
    legend = "".join(
        f'<span class="key"><i class="s{index % COLORS}"></i>{html(name)} <b>{number(own[-1][1])}</b></span>'
        for index, (name, own) in enumerate(drawn.items())
    )
    data = json.dumps([[[float(f"{x:.7g}"), float(f"{y:.4g}")] for x, y in thin(own)] for own in drawn.values()])
    heading = html(title) + (f"<small>{html(unit)}</small>" if unit else "")
    picture = f'<svg viewBox="0 0 460 220" role="img" aria-label="{html(title)}" data-stacked="{int(stacked)}" '
    picture += f'data-series="{data}"></svg>'
    return f"<figure><figcaption>{heading}<span class=tip></span></figcaption>{picture}<p>{legend}</p></figure>"


def thin(own: Sequence[Point]) -> Sequence[Point]:
    """Return at most `MAX_POINTS` points: means of equal buckets, each at its last step."""
    return [(bucket[-1][0], statistics.fmean(y for _, y in bucket)) for bucket in buckets(own, MAX_POINTS)]
