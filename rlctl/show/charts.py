"""Line charts and stacked bands as inline SVG: no script, no network, colours from the page's CSS."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from rlctl.show.text_format import html, number

Point = tuple[float, float]
Series = Mapping[str, Sequence[Point]]

WIDTH, HEIGHT = 460, 220
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 10, 26
COLORS = 8  # that lines and bands can be told apart by
MAX_POINTS = 300  # a longer series is averaged into that many buckets
PLOT_HEIGHT = HEIGHT - TOP - BOTTOM
# Where lines may be: once on a page, for all of its charts.
PLOT_AREA = (
    f'<svg class="hidden" aria-hidden="true"><clipPath id="plot"><rect x="{LEFT - 4}" y="{TOP - 4}" '
    f'width="{WIDTH - LEFT - RIGHT + 8}" height="{PLOT_HEIGHT + 8}"/></clipPath></svg>'
)
FLAT = 0.02  # of the values' size: the least that the height of a picture stands for
SMOOTH_FROM = 40  # from so many points on, a moving average lies over the raw line


def line_chart(title: str, series: Series, *, unit: str = "") -> str:
    """One figure; empty string when no series has a point. Points are (step, value), ascending in step."""
    drawn = {name: thin(points) for name, points in series.items() if points}
    if not drawn:
        return ""
    values = [y for points in drawn.values() for _, y in points]
    axes = Axes(_steps(drawn), nice_range(min(values), max(values)))
    body = []
    for index, (name, points) in enumerate(drawn.items()):
        long, css = len(points) >= SMOOTH_FROM, f"s{index % COLORS}"
        body.append(axes.line(points, f"{css} raw" if long else css, name))
        if long:
            body.append(axes.line(moving_average(points), css, f"{name}, smoothed", told=False))
        elif len(points) <= 2:
            body += [axes.dot(point, css) for point in points]
    latest = {name: points[-1][1] for name, points in series.items() if points}
    return _figure(title, unit, latest, "".join(body), axes)


def stacked_chart(title: str, series: Series, *, unit: str = "") -> str:
    """Bands on top of each other; every series must have the same steps."""
    drawn = {name: thin(points) for name, points in series.items() if points}
    if not drawn:
        return ""
    steps = [x for x, _ in next(iter(drawn.values()))]
    floor = [0.0] * len(steps)
    tops: dict[str, list[float]] = {}
    for name, points in drawn.items():
        floor = [below + y for below, (_, y) in zip(floor, points, strict=True)]
        tops[name] = floor
    axes = Axes(_steps(drawn), nice_range(0.0, max(floor)))
    body, below = [], [0.0] * len(steps)
    for index, (name, top) in enumerate(tops.items()):
        body.append(axes.band(steps, below, top, f"b{index % COLORS}", name, drawn[name]))
        below = top
    latest = {name: points[-1][1] for name, points in series.items() if points}
    return _figure(title, unit, latest, "".join(body), axes, bands=True)


class Axes:
    """Maps steps and values to the picture."""

    def __init__(self, x_range: tuple[float, float], y_ticks: Sequence[float]) -> None:
        self.x0, self.x1 = x_range
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

    def line(self, points: Sequence[Point], css: str, label: str, *, told: bool = True) -> str:
        """`told`: whether the pointer tells its values."""
        path = " ".join(f"{self.x(x):.2f},{self.y(y):.2f}" for x, y in points)
        about = f'class="line {css}"' + (_told(points) if told else "")
        return f'<polyline {about} points="{path}"><title>{html(label)}</title></polyline>'

    def dot(self, point: Point, css: str) -> str:
        return f'<circle class="dot {css}" cx="{self.x(point[0]):.1f}" cy="{self.y(point[1]):.1f}" r="3"/>'

    def band(
        self, steps: Sequence[float], low: Sequence[float], high: Sequence[float], css: str, label: str,
        told: Sequence[Point],
    ) -> str:  # fmt: skip
        """`told`: the values that the pointer tells: those of the band alone."""
        upper = [f"{self.x(x):.2f},{self.y(y):.2f}" for x, y in zip(steps, high, strict=True)]
        lower = [f"{self.x(x):.2f},{self.y(y):.2f}" for x, y in zip(steps, low, strict=True)]
        path = " ".join([*upper, *reversed(lower)])
        about = f'class="band {css}"' + _told(told)
        return f'<polygon {about} points="{path}"><title>{html(label)}</title></polygon>'


def _told(points: Sequence[Point]) -> str:
    """The values of a series, for the pointer."""
    values = " ".join(f"{x:.7g},{y:.4g}" for x, y in points)
    return f' data-values="{values}"'


def _figure(title: str, unit: str, latest: Mapping[str, float], body: str, axes: Axes, *, bands: bool = False) -> str:
    kind = "b" if bands else "s"
    legend = "".join(
        f'<span class="key"><i class="{kind}{index % COLORS}"></i>{html(name)} <b>{number(value)}</b></span>'
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


def _steps(series: Series) -> tuple[float, float]:
    steps = [x for points in series.values() for x, _ in points]
    return min(steps), max(steps)


def thin(points: Sequence[Point], limit: int = MAX_POINTS) -> list[Point]:
    """At most `limit` points: means of equal buckets. First and last step stay."""
    if len(points) <= limit:
        return list(points)
    edges = [len(points) * i // limit for i in range(limit + 1)]
    buckets = [points[a:b] for a, b in itertools.pairwise(edges)]
    means = [(sum(x for x, _ in bucket) / len(bucket), sum(y for _, y in bucket) / len(bucket)) for bucket in buckets]
    return [(points[0][0], means[0][1]), *means[1:-1], (points[-1][0], means[-1][1])]


def moving_average(points: Sequence[Point]) -> list[Point]:
    """Mean over a centred window of about a twelfth of the series, narrower towards the ends: one that reached to one
    side alone would begin and end a slope at another value."""
    most = max(1, len(points) // 24)
    out = []
    for index, (x, _) in enumerate(points):
        half = min(most, index, len(points) - 1 - index)
        window = points[index - half : index + half + 1]
        out.append((x, sum(y for _, y in window) / len(window)))
    return out


def nice_range(low: float, high: float, ticks: int = 4) -> list[float]:
    """Round tick values that enclose low..high, at steps of 1, 2, 2.5 or 5 times a power of ten."""
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
