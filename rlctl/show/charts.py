"""Draw line charts and stacked bands as inline SVG: no script, no network, colours from the page's CSS."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rlctl.show.text_format import html, number

Point = tuple[float, float]
Series = Mapping[str, Sequence[Point]]

WIDTH, HEIGHT = 460, 220
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 10, 26
COLORS = 8  # lines and bands that can be told apart
MAX_POINTS = 300  # a longer series is averaged into that many buckets
PLOT_HEIGHT = HEIGHT - TOP - BOTTOM
# Where lines may be: once on a page, for all of its charts.
PLOT_AREA = (
    f'<svg class="hidden" aria-hidden="true"><clipPath id="plot"><rect x="{LEFT - 4}" y="{TOP - 4}" '
    f'width="{WIDTH - LEFT - RIGHT + 8}" height="{PLOT_HEIGHT + 8}"/></clipPath></svg>'
)
FLAT = 0.02  # share of the values' size: the least that the height of a picture stands for
SMOOTH_FROM = 40  # from so many points on, a moving average lies over the raw line
LARGEST = 1e300  # sums and spans of numbers below it are numbers, too


def drawable(value: object) -> float | None:
    """Return a number that a chart can hold, else None."""
    return float(value) if isinstance(value, int | float) and -LARGEST < value < LARGEST else None


def points(records: Iterable[Mapping[str, Any]], key: str) -> list[Point]:
    """Return (step, value) wherever the key has a number that can be drawn."""
    values = ((record["step"], drawable(record.get(key))) for record in records)
    return [(step, value) for step, value in values if value is not None]


def line_chart(title: str, series: Series, *, unit: str = "") -> str:
    """Return one figure; an empty string when no series has a point. Points ascend in step."""
    drawn = {name: thin(own) for name, own in series.items() if own}
    if not drawn:
        return ""
    values = [y for own in drawn.values() for _, y in own]
    axes = Axes(drawn, nice_range(min(values), max(values)))
    body = []
    for index, (name, own) in enumerate(drawn.items()):
        long, css = len(own) >= SMOOTH_FROM, f"s{index % COLORS}"
        body.append(axes.line(own, f"{css} raw" if long else css, name))
        if long:
            body.append(axes.line(moving_average(own), css, f"{name}, smoothed", pointed=False))
        elif len(own) <= 2:
            body += [axes.dot(point, css) for point in own]
    return _figure(title, unit, series, "".join(body), axes)


def stacked_chart(title: str, series: Series, *, unit: str = "") -> str:
    """Return bands on top of each other; every series must have the same steps."""
    drawn = {name: thin(own) for name, own in series.items() if own}
    if not drawn:
        return ""
    steps = [x for x, _ in next(iter(drawn.values()))]
    edges = [[0.0] * len(steps)]
    for own in drawn.values():
        edges.append([below + y for below, (_, y) in zip(edges[-1], own, strict=True)])
    axes = Axes(drawn, nice_range(0.0, max(edges[-1])))
    bands = zip(drawn.items(), itertools.pairwise(edges), strict=True)
    body = [
        axes.band(list(zip(steps, low, strict=True)), list(zip(steps, high, strict=True)), f"s{i % COLORS}", name, own)
        for i, ((name, own), (low, high)) in enumerate(bands)
    ]
    return _figure(title, unit, series, "".join(body), axes)


class Axes:
    """Map steps and values to places in the picture."""

    def __init__(self, drawn: Series, y_ticks: Sequence[float]) -> None:
        steps = [x for own in drawn.values() for x, _ in own]
        self.x0, self.x1 = min(steps), max(steps)
        self.ticks = y_ticks
        self.y0, self.y1 = y_ticks[0], y_ticks[-1]

    def x(self, step: float) -> float:
        return LEFT + (step - self.x0) / ((self.x1 - self.x0) or 1.0) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.y0) / ((self.y1 - self.y0) or 1.0) * (HEIGHT - TOP - BOTTOM)

    def grid(self) -> str:
        parts = []
        for tick in self.ticks:
            y = self.y(tick)
            parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(f'<text class="tick" x="{LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{tick:.6g}</text>')
        for step in sorted({math.ceil(self.x0), round((self.x0 + self.x1) / 2), math.floor(self.x1)}):
            anchor = "start" if step == self.x0 else "end" if step == self.x1 else "middle"
            at = f'x="{self.x(step):.1f}" y="{HEIGHT - 8}" text-anchor="{anchor}"'
            parts.append(f'<text class="tick" {at}>{step}</text>')
        return "".join(parts)

    def line(self, own: Sequence[Point], css: str, label: str, *, pointed: bool = True) -> str:
        """`pointed`: whether the pointer shows its values."""
        about = f'class="line {css}"' + (_values(own) if pointed else "")
        return f'<polyline {about} points="{self._path(own)}"><title>{html(label)}</title></polyline>'

    def band(self, low: Sequence[Point], high: Sequence[Point], css: str, label: str, own: Sequence[Point]) -> str:
        """`own`: the values that the pointer shows."""
        about = f'class="band {css}"' + _values(own)
        return f'<polygon {about} points="{self._path([*high, *reversed(low)])}"><title>{html(label)}</title></polygon>'

    def dot(self, point: Point, css: str) -> str:
        return f'<circle class="dot {css}" cx="{self.x(point[0]):.1f}" cy="{self.y(point[1]):.1f}" r="3"/>'

    def _path(self, own: Iterable[Point]) -> str:
        return " ".join(f"{self.x(x):.2f},{self.y(y):.2f}" for x, y in own)


def _values(own: Sequence[Point]) -> str:
    values = " ".join(f"{x:.7g},{y:.4g}" for x, y in own)
    return f' data-values="{values}"'


def _figure(title: str, unit: str, series: Series, body: str, axes: Axes) -> str:
    latest = {name: own[-1][1] for name, own in series.items() if own}
    legend = "".join(
        f'<span class="key"><i class="s{index % COLORS}"></i>{html(name)} <b>{number(value)}</b></span>'
        for index, (name, value) in enumerate(latest.items())
    )
    heading = f"{html(title)}<small>{html(unit)}</small>" if unit else html(title)
    bar = (
        f'<line class="bar" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/><rect class="picked" y="{TOP}" height="{PLOT_HEIGHT}"/>'
    )
    ranges = f'data-x="{axes.x0},{axes.x1}" data-y="{axes.y0},{axes.y1}"'
    frame = f'{ranges} data-frame="{LEFT},{WIDTH - RIGHT},{TOP},{HEIGHT - BOTTOM}" data-flat="{FLAT}"'
    shapes = f'{axes.grid()}<g clip-path="url(#plot)">{body}</g>{bar}'
    picture = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" {frame} role="img" aria-label="{html(title)}">{shapes}</svg>'
    return f"<figure><figcaption>{heading}<span class=tip></span></figcaption>{picture}<p>{legend}</p></figure>"


def thin(own: Sequence[Point], limit: int = MAX_POINTS) -> list[Point]:
    """Return at most `limit` points: means of equal buckets. The first and last step stay."""
    if len(own) <= limit:
        return list(own)
    edges = [len(own) * i // limit for i in range(limit + 1)]
    buckets = [own[a:b] for a, b in itertools.pairwise(edges)]
    means = [(sum(x for x, _ in bucket) / len(bucket), sum(y for _, y in bucket) / len(bucket)) for bucket in buckets]
    return [(own[0][0], means[0][1]), *means[1:-1], (own[-1][0], means[-1][1])]


def moving_average(own: Sequence[Point]) -> list[Point]:
    """Average over a centred window of about a twelfth of the series, narrower towards the ends: a one-sided window
    would begin and end a slope at another value."""
    widest = max(1, len(own) // 24)
    out = []
    for index, (x, _) in enumerate(own):
        half = min(widest, index, len(own) - 1 - index)
        window = own[index - half : index + half + 1]
        out.append((x, sum(y for _, y in window) / len(window)))
    return out


def nice_range(low: float, high: float, ticks: int = 4) -> list[float]:
    """Return round tick values that enclose low..high, at steps of 1, 2, 2.5 or 5 times a power of ten."""
    size = max(abs(low), abs(high))
    if high - low < FLAT * size and size > 1e-280:  # rounding and noise of a level line, which would fill the picture
        middle = (low + high) / 2
        low, high = middle - FLAT * size / 2, middle + FLAT * size / 2
    if high - low <= max(size * 1e-9, 1e-290):  # a flat line, or one that float arithmetic cannot divide
        spread = size * 0.5 if size > 1e-280 else 1.0
        low, high = low - spread, high + spread
    rough = (high - low) / ticks
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [index * step for index in range(first, last + 1)]
