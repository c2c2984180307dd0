"""Show a run while it runs: a live panel on a terminal, plain lines anywhere else.

No thread: the driver calls `tick()` while it waits, and the panel is redrawn at most a few times a second.
Keys of `step()` are those of `metrics.jsonl`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rlctl.show import eval_keys
from rlctl.show.screen import Screen, redraws
from rlctl.show.streams import replace_unwritable
from rlctl.show.text_format import FEW_FINISH, count, counted, duration, number, replicas, share, sparkline, time_shares
from specs.phases import Phase
from specs.schema.eval_sets import Evaluation
from specs.wire.heartbeat import Moving, amount

REDRAW_S = 0.15
PLAIN_LINE_S = 1.0  # at most one plain line per second
EVAL_LINE_S = 5.0  # between two plain lines of an evaluation
PLAIN_QUIET_S = 30.0  # a plain line while nothing else happens
STILL_S = 10.0  # from when on it is shown how long nothing has moved
NARROW = 60  # columns below which the panel has no progress bar
MANY_SILENT = 0.5  # share of groups from which on the panel says that they teach nothing
STALENESS = "rollout/staleness_mean"
WINDOW = 20  # steps that rates and shares are taken over
COLORS = ("cyan", "magenta", "blue", "green", "yellow", "red", "white")


class Progress:
    """Show a run within a `with` block. `live` forces the panel on or off; by default it follows the console."""

    unit = "step"  # what is counted

    def __init__(self, total_steps: int, name: str, console: Screen | None = None, live: bool | None = None) -> None:
        self.console = console or Screen(outlives=True)
        replace_unwritable(self.console.file)
        self.live = redraws(self.console) if live is None else live
        self._total, self._step, self._name = total_steps, 0, name
        self._started = self._phase_started = time.monotonic()
        self._phase = "start"
        self._headline = eval_keys.HEADLINES[0]
        self._values: list[float | None] = []  # of the headline
        self._recent: deque[dict[str, Any]] = deque(maxlen=WINDOW)
        self._step_s: deque[float] = deque(maxlen=WINDOW)
        self._evals: dict[str, list[tuple[int, dict[str, float]]]] = {}  # step and metrics of each, by name
        self._checkpoint: int | None = None
        self._warnings = 0
        self._keep: Callable[[str], None] = lambda text: None
        self._last_line = 0.0
        self._drawn = 0.0
        self._display: Live | None = None
        self._moving: Callable[[], Moving] = Moving
        self._done_before: Mapping[str, int] = {}

    def __enter__(self) -> Self:
        self._started = self._phase_started = time.monotonic()
        if self.live:
            self._display = Live(self.render(), console=self.console, auto_refresh=False, transient=False)
            self._display.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._display is not None:
            self._phase = ""
            self._redraw()
            self._display.stop()
            self._display = None

    def phase(self, phase: Phase, doing: str = "") -> None:
        """Set the current phase. `doing` describes it where the phase's name is not enough."""
        self._phase, self._phase_started = f"{phase} ({doing})" if doing else phase, time.monotonic()
        self._done_before = self._moving().done
        self.tick()

    def follow(self, moving: Callable[[], Moving]) -> None:
        """Ask `moving` how far the roles are."""
        self._moving = moving

    def keep_warnings(self, keep: Callable[[str], None]) -> None:
        """Pass every warning to `keep`."""
        self._keep = keep

    def start_at(self, step: int) -> None:
        """Begin after a restored checkpoint: so many steps are done."""
        self._step = step

    def step(self, metrics: Mapping[str, Any]) -> None:
        """Show a step that ended; `metrics` is its line of `metrics.jsonl`."""
        now = time.monotonic()
        self._step_s.append(metrics.get("time/wall_s") or metrics.get("time/step_s") or 0.0)
        self._step = int(metrics["step"])
        self._headline = eval_keys.headline([metrics])
        self._values.append(metrics.get(self._headline.key))
        self._recent.append(dict(metrics))
        self._keep_evals(self._step, metrics)
        if self.live:
            self._redraw()
        elif now - self._last_line >= PLAIN_LINE_S or self._step >= self._total or eval_keys.by_set(metrics):
            self.message(self._plain_line())

    def evaluation(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Show an evaluation that ended before the first step."""
        self._keep_evals(step, metrics)
        if not self.live:
            for name, values in eval_keys.by_set(metrics).items():
                self.message(f"eval {name}  step {step}  {eval_keys.word(values)} {eval_keys.words(values)}")

    def checkpoint(self, step: int) -> None:
        """Show that a checkpoint was written. The time that it took is its step's."""
        self._checkpoint = step
        if self._step_s:  # none where the first step's metrics were refused
            self._step_s[-1] += time.monotonic() - self._phase_started
        if not self.live:
            self.message(f"checkpoint  step {step}")

    def message(self, what: RenderableType) -> None:
        """Print a line, or anything that rich can, above the panel."""
        self._last_line = time.monotonic()
        self.console.print(what, soft_wrap=not self.live and isinstance(what, str | Text))

    def warning(self, text: str) -> None:
        """Print a warning above the panel, which counts them."""
        self._warnings += 1
        self._keep(text)
        self.message(Text.assemble(("warning: ", "bold yellow"), text))

    def tick(self) -> None:
        """Redraw when it is due. Called often while the driver waits, and cheap."""
        now = time.monotonic()
        if self.live:
            if now - self._drawn >= REDRAW_S:
                self._redraw()
        elif now - max(self._last_line, self._phase_started) >= PLAIN_QUIET_S:
            self.message("  ".join([f"… {self._phase} for {duration(now - self._phase_started)}", *self._so_far()]))

    def _so_far(self) -> list[str]:
        """Say what is done since the phase began, how long the rest takes, and for how long nothing has moved."""
        moving = self._moving()
        done = [(moving.done.get(unit, 0) - self._done_before.get(unit, 0), unit) for unit in moving.units]
        left = [f"ETA {duration(moving.eta_s)}"] * bool(moving.eta_s)
        still = [f"nothing has moved for {duration(moving.still_s)}"] if moving.still_s >= STILL_S else []
        return [", ".join(amount(more, unit) for more, unit in done) + " so far"] * bool(done) + left + still

    @property
    def eta_s(self) -> float | None:
        """Estimate the seconds left from the recent steps without the very first (a warm-up); None before any."""
        seen = list(self._step_s)
        if len(seen) > 1 and len(self._values) <= WINDOW:
            seen = seen[1:]
        return (self._total - self._step) * sum(seen) / len(seen) if seen else None

    # ── plain lines ───────────────────────────────────────────────────────────────────────────────

    def _plain_line(self) -> str:
        latest = self._recent[-1]
        headline = self._headline
        parts = [f"step {self._step}/{self._total}", f"{headline.word} {number(latest.get(headline.key))}"]
        parts += _losses(latest, headline.key)
        parts += _known(latest, kl="actor/kl", length="rollout/length_mean", stale=STALENESS, epoch="data/epoch")
        if (finished := latest.get("rollout/finished")) is not None:
            parts.append(f"finished {share(finished)}")
        parts += filter(None, (_silent(latest), replicas(latest)))
        for name, history in self._evals.items():
            step, values = history[-1]
            if step == self._step:
                word = "" if eval_keys.main(values) == headline.metric else f"{eval_keys.word(values)} "
                parts.append(f"eval {name} {word}{eval_keys.words(values)}")
        parts.append(f"{count(latest.get('perf/tokens_per_s'))} tokens/s")
        shares = time_shares([latest])
        split = " ".join(f"{name} {part:.0%}" for name, part in shares.items() if part >= 0.005)
        parts.append(f"{number(latest.get('time/step_s'))} s" + (f" ({split})" if split else ""))
        parts.append(f"ETA {duration(self.eta_s)}")
        return "  ".join(parts)

    # ── the panel ─────────────────────────────────────────────────────────────────────────────────

    def _redraw(self) -> None:
        if self._display is not None:
            self._display.update(self.render(), refresh=True)
            self._drawn = time.monotonic()

    def _keep_evals(self, step: int, metrics: Mapping[str, Any]) -> None:
        for name, values in eval_keys.by_set(metrics).items():
            history = self._evals.setdefault(name, [])
            if not history or history[-1][0] != step:
                history.append((step, values))

    def render(self) -> RenderableType:
        """Return the panel as it stands now."""
        rows = Table.grid(padding=(0, 2), expand=True)
        rows.add_column(style="bold", no_wrap=True, width=7)
        rows.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
        width = max(20, self.console.width - 9)
        if self._values:  # the first step says what the run is followed by
            rows.add_row(self._headline.word, self._headline_row(width))
        for name, history in self._evals.items():
            rows.add_row("eval", _eval_row(name, history, width))
        if self._recent and self._recent[-1].get("rollout/length_mean") is not None:
            rows.add_row("length", self._length_row(width))
        rows.add_row("speed", self._speed_row(width))
        rows.add_row("time", _time_row(list(self._recent), width))
        rows.add_row("now", self._now_row(width))
        return Group(self._head(), rows)

    def _head(self) -> RenderableType:
        elapsed = duration(time.monotonic() - self._started)
        step, eta = f"{self.unit} {self._step}/{self._total}", f"{elapsed} · ETA {duration(self.eta_s)}"
        name = Text(self._name, style="bold")
        if self.console.width < NARROW:
            return _fitting([Text(step), Text(eta), name], self.console.width)
        head = Table.grid(padding=(0, 2), expand=True)
        head.add_column(no_wrap=True, max_width=self.console.width - len(step) - len(eta) - 10)
        for ratio in (None, 1, None):
            head.add_column(ratio=ratio, no_wrap=True)
        bar = ProgressBar(total=max(1, self._total), completed=self._step, complete_style="cyan")
        head.add_row(name, Text(step), bar, Text(eta))
        return head

    def _headline_row(self, width: int) -> Text:
        parts = [Text(number(self._values[-1]), style="bold green")]
        if self._recent and (silent := _silent(self._recent[-1])):
            parts.append(Text(silent, style="yellow"))
        known = [value for value in self._values if value is not None]
        if known:
            parts.append(Text(sparkline(known, max(8, min(48, width - 33))), style="green"))
            parts.append(Text(f"from {number(known[0])}, best {number((min if self._headline.falls else max)(known))}"))
        return _fitting(parts, width)

    def _length_row(self, width: int) -> Text:
        """Say how many completions end by themselves instead of being truncated, and how long they are."""
        latest, parts = self._recent[-1], []
        if (finished := latest.get("rollout/finished")) is not None:
            few = "yellow" if finished < FEW_FINISH else ""
            parts.append(Text(f"finished {share(finished)}, truncated {share(1 - finished)}", style=few))
        parts.append(Text(f"{number(latest.get('rollout/length_mean'))} tokens"))
        parts.append(Text(f"longest {number(latest.get('rollout/length_max'))}"))
        return _fitting(parts, width)

    def _speed_row(self, width: int) -> Text:
        latest = self._recent[-1] if self._recent else {}
        parts = [f"{count(latest.get('perf/tokens_per_s'))} tokens/s", f"{number(latest.get('time/step_s'))} s/step"]
        parts += _losses(latest, self._headline.key)
        parts += _known(latest, KL="actor/kl", entropy="actor/entropy", gap="rollout/logprob_gap", stale=STALENESS)
        parts += _known(latest, epoch="data/epoch")
        return _fitting([Text(part) for part in parts], width)

    def _now_row(self, width: int) -> Text:
        parts = []
        if self._phase:
            spent = duration(time.monotonic() - self._phase_started)
            parts += [Text(part) for part in (f"{self._phase} for {spent}", *self._so_far())]
        if self._recent and (fewer := replicas(self._recent[-1])):
            parts.append(Text(fewer, style="yellow"))
        if self._warnings:
            parts.append(Text(counted(self._warnings, "warning"), style="yellow"))
        if self._checkpoint is not None:
            parts.append(Text(f"checkpoint at step {self._checkpoint}", style="dim"))
        return _fitting(parts, width) if parts else Text("done" if self._step >= self._total else "ended")


def _known(metrics: Mapping[str, Any], **keys: str) -> list[str]:
    """Write `label value` for each key that the metrics have."""
    return [f"{label} {number(metrics[key])}" for label, key in keys.items() if metrics.get(key) is not None]


def _losses(metrics: Mapping[str, Any], shown: str) -> list[str]:
    """Write the loss of what learns, where that is not `shown` already."""
    keys = (key for key in ("actor/loss", "reward_model/loss") if key != shown)
    return [text for key in keys for text in _known(metrics, loss=key)]


def _silent(metrics: Mapping[str, Any]) -> str:
    """Say how many groups taught nothing in a step, where it is half of them or more."""
    silent = metrics.get("reward/silent_groups")
    return "" if silent is None or silent < MANY_SILENT else f"{share(silent)} of groups without signal"


def _fitting(parts: Sequence[Text], width: int) -> Text:
    """Put as many of the parts in a line as fit: a number that is cut misleads."""
    row = parts[0].copy() if parts else Text()
    for part in parts[1:]:
        if row.cell_len + 2 + part.cell_len > width:
            break
        row = Text.assemble(row, "  ", part)
    return row


def _eval_row(name: str, history: Sequence[tuple[int, Mapping[str, float]]], width: int) -> Text:
    """Show the newest values of a set, and its first mean."""
    (step, values), main = history[-1], eval_keys.main(history[-1][1])
    first = history[0][1].get(main)
    parts = [Text(f"{name} {number(values[main])}", style="green").append(f" at step {step}", style="dim")]
    others = [metric for metric in eval_keys.shown(values) if metric != main]
    parts += [Text(f"{metric} {number(values[metric])}", style="green") for metric in others]
    return _fitting([*parts, Text(f"first {number(first)}", style="dim")], width)


def _time_row(records: Sequence[dict[str, Any]], width: int) -> Text:
    """Draw a bar of the phases' shares, with the legend of as many as fit."""
    shares = {name: part for name, part in time_shares(records).items() if part >= 0.005}
    if not shares:
        return Text("–")
    legend = sum(len(name) + 6 for name in shares)
    colors = dict(zip(shares, COLORS * len(shares), strict=False))
    bar = Text()
    for name, part in shares.items():
        bar.append("━" * round(max(10, width - legend) * part), style=colors[name])
    named = [Text(name, style=colors[name]).append(f" {part:.0%}", style="default") for name, part in shares.items()]
    return _fitting([bar, *named], width)


class EvalProgress(Progress):
    """Show `rlctl eval`: count completions instead of steps."""

    unit = "completion"

    def __init__(self, name: str, total: int, console: Screen | None = None) -> None:
        super().__init__(total, name, console)
        self._before = 0  # of the sets that are done
        self._sampling_since = 0.0

    def phase(self, phase: Phase, doing: str = "") -> None:
        if phase == "rollout" and doing:
            self._before = self._step
            self._sampling_since = self._sampling_since or time.monotonic()
        super().phase(phase, doing)

    def arrived(self, one: Evaluation, done: int, of: int) -> None:
        """Show how many completions of a set are here."""
        self._step = self._before + done
        if self.live:
            self.tick()
        elif self._step >= self._total or time.monotonic() - self._last_line >= EVAL_LINE_S:
            self.message(f"eval {one.name}  {done}/{of} completions  ETA {duration(self.eta_s)}")

    @property
    def eta_s(self) -> float | None:
        """Estimate the seconds left at the pace so far."""
        spent = time.monotonic() - self._sampling_since
        return spent / self._step * (self._total - self._step) if self._step else None

    def render(self) -> RenderableType:
        return Group(self._head(), Text.assemble(("now    ", "bold"), self._now_row(max(20, self.console.width - 9))))
