"""The lines and the panel by which a person follows a run."""

from __future__ import annotations

import io
from functools import partial
from typing import Any

import pytest
from hand_clock import HandClock
from rich.console import Console

from rlctl.show import progress as module
from rlctl.show.progress import Progress
from rlctl.show.screen import Screen
from specs.wire.heartbeat import Moving


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> HandClock:
    clock = HandClock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def console(width: int = 80, *, terminal: bool) -> Console:
    return Console(file=io.StringIO(), width=width, force_terminal=terminal, color_system=None)


def text_of(target: Console) -> str:
    assert isinstance(target.file, io.StringIO)
    return target.file.getvalue()


def metrics(step: int, **more: Any) -> dict[str, Any]:
    times = {
        "time/step_s": 1.0,
        "time/rollout_s": 0.5,
        "time/reward_s": 0.05,
        "time/update_s": 0.3,
        "time/sync_s": 0.05,
    }
    return {"step": step, "reward/mean": step / 100, "perf/tokens_per_s": 12_400.0, **times, **more}


def run(bar: Progress, clock: HandClock, steps: range, seconds: float) -> None:
    for step in steps:
        clock.now += seconds
        bar.step(metrics(step, **{"time/wall_s": seconds}))


def test_what_is_slow_shows_how_far_it_is(clock: HandClock) -> None:
    for live in (False, True):
        state = [Moving({"token": 500, "grade": 64}, ("token",))]
        target = console(120, terminal=live)
        with Progress(120, "quickstart", target) as bar:
            bar.follow(partial(state.__getitem__, 0))
            bar.phase("rollout")
            state[0] = Moving({"token": 1_734, "grade": 64}, ("token", "grade"), still_s=4.0)
            clock.now += 41
            bar.tick()
            assert "rollout for 0:41" in text_of(target)
            assert "1,234 tokens, 0 grades so far" in text_of(target)
            assert "nothing has moved" not in text_of(target)
            assert "so far  ETA" not in text_of(target)
            state[0] = Moving(state[0].done, ("token",), still_s=33.0, eta_s=75.0)
            clock.now += 31
            bar.tick()
            assert "1,234 tokens so far  ETA 1:15" in text_of(target)
            assert "nothing has moved for 0:33" in text_of(target)


def test_plain_lines_name_what_matters(clock: HandClock) -> None:
    target = console(terminal=False)
    with Progress(120, "quickstart", target) as bar:
        run(bar, clock, range(1, 4), 2.0)
        clock.now += 2.0
        ahead = {"rollout/staleness_mean": 1.5, "rollout/finished": 0.9996}
        sets = {"eval/heldout/reward_mean": 0.71, "eval/aime/reward_mean": 0.2, "eval/aime/pass@8": 0.4}
        bar.step(metrics(4, **{"actor/loss": -0.0012, **sets, **ahead}))
    lines = text_of(target).splitlines()
    assert len(lines) == 4
    for part in ("step 4/120", "reward 0.0400", "loss -0.0012", "eval heldout 0.710  eval aime 0.200, pass@8 0.400",
                 "12.4k tokens/s", "rollout 50%",
                 "stale 1.50", "finished 99.96%", "other 10%", "ETA 3:13"):  # fmt: skip
        assert part in lines[-1]


def test_an_evaluation_by_other_than_what_is_learned_says_by_what(clock: HandClock) -> None:
    target = console(terminal=False)
    with Progress(4, "sft", target) as bar:
        rows = {key: value for key, value in metrics(4, **{"actor/loss": 2.24}).items() if key != "reward/mean"}
        bar.step({**rows, "eval/heldout/reward_mean": 0.197, "eval/rows/loss": 2.5})
    assert "loss 2.24" in text_of(target)
    assert "eval heldout reward 0.197  eval rows 2.50" in text_of(target)


def test_fast_steps_give_at_most_a_line_a_second_and_always_the_last(clock: HandClock) -> None:
    target = console(terminal=False)
    with Progress(1000, "fast", target) as bar:
        run(bar, clock, range(1, 1001), 0.01)
    lines = text_of(target).splitlines()
    assert len(lines) <= 12
    assert lines[-1].startswith("step 1000/1000")


def test_a_long_wait_is_told_in_plain_lines(clock: HandClock) -> None:
    target = console(terminal=False)
    with Progress(10, "x", target) as bar:
        bar.phase("build", "roles")
        for _ in range(100):
            clock.now += 0.7
            bar.tick()
    assert [line.split(" for")[0] for line in text_of(target).splitlines()] == ["… build (roles)"] * 2


@pytest.mark.parametrize("width", [40, 120])
def test_the_panel_fits_its_width_and_shows_everything(clock: HandClock, width: int) -> None:
    target = console(width, terminal=True)
    bar = Progress(120, "quickstart", target)
    with target.capture() as before:
        target.print(bar.render())
    assert "reward" not in before.get(), "not known before a step: a run of sft has a loss"
    bar.evaluation(0, {"eval/heldout/reward_mean": 0.12, "eval/heldout/pass@1": 0.25, "eval/heldout/pass@8": 0.5})
    run(bar, clock, range(1, 60), 1.0)
    clock.now += 1.0
    ends = {"rollout/finished": 0.015, "rollout/length_mean": 123.4, "rollout/length_max": 512, "time/wall_s": 1.0}
    bar.step(metrics(60, **ends))
    bar.phase("save")
    bar.checkpoint(50)
    bar.warning("odd [numbers]")
    bar.phase("rollout")
    panel = io.StringIO()
    Console(file=panel, width=width, color_system=None).print(bar.render())
    lines = panel.getvalue().splitlines()
    assert max(len(line) for line in lines) <= width
    assert "…" not in panel.getvalue(), "a number that is cut misleads"
    for part in ("step 60/120", "ETA 1:00", "0.600", "█", "heldout 0.120 at step 0", "12.4k tokens/s", "1 s/step",
                 "rollout 50%", "rollout for 0:00", "1 warning"):  # fmt: skip
        assert part in panel.getvalue()
    assert "finished 1.5%" in panel.getvalue()
    assert ("truncated 98.5%" in panel.getvalue(), "checkpoint at step 50" in panel.getvalue()) == (True, width > 40)
    assert "warning: odd [numbers]" in text_of(target)


@pytest.mark.parametrize("width", [60, 80])
def test_a_long_name_leaves_room_for_the_step_and_the_estimate(clock: HandClock, width: int) -> None:
    target = console(width, terminal=True)
    with Progress(12_000, "grpo-qwen2.5-7b-gsm8k-lr1e-6-kl0.001-seed0-" * 3, target) as bar:
        run(bar, clock, range(1, 3), 60.0)
    head = next(line for line in text_of(target).splitlines()[::-1] if "ETA" in line)
    assert "grpo-" in head
    assert "step 2/12000" in head
    assert head.endswith("2:00 · ETA 8d 07:58")


def test_the_estimate_leaves_the_first_step_out_and_counts_from_the_resumed_one(clock: HandClock) -> None:
    bar = Progress(100, "resumed", console(terminal=False))
    bar.start_at(90)
    bar.checkpoint(90)
    assert bar.eta_s is None
    run(bar, clock, range(91, 92), 60.0)
    run(bar, clock, range(92, 96), 2.0)
    assert bar.eta_s == pytest.approx(5 * 2.0)
    bar.phase("save")
    clock.now += 8.0
    bar.checkpoint(95)
    assert bar.eta_s == pytest.approx(5 * (2.0 + 8.0 / 4))


def test_a_console_without_unicode_does_not_end_the_run() -> None:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding="ascii", write_through=True)
    with Progress(10, "x", Console(file=file, width=80, force_terminal=True, color_system=None)) as bar:
        for step in range(1, 5):
            bar.step(metrics(step))
    assert b"step 4/10" in raw.getvalue()


@pytest.mark.parametrize(("silent", "words"), [(0.4, ""), (0.93, "93.0% of groups without signal")])
@pytest.mark.parametrize("terminal", [True, False])
def test_groups_that_teach_nothing_are_seen(clock: HandClock, terminal: bool, silent: float, words: str) -> None:
    target = console(120, terminal=terminal)
    with Progress(9, "quickstart", target) as bar:
        clock.now += 2
        bar.step(metrics(1, **{"reward/silent_groups": silent}))
    assert ("without signal" in text_of(target)) is bool(words)
    assert words in text_of(target)


@pytest.mark.parametrize("env", [{"TERM": "dumb"}, {"FORCE_COLOR": "1"}, {}])
def test_no_panel_where_nothing_can_be_drawn_over(env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    file = io.StringIO()
    file.isatty = lambda: env.get("TERM") == "dumb"  # type: ignore[method-assign]
    with Progress(2, "mine", Screen(file=file, width=80)) as progress:
        assert not progress.live
        for _ in range(50):
            progress.tick()
        progress.step({"step": 2, "reward/mean": 0.5, "time/step_s": 0.1})
    assert len(file.getvalue().splitlines()) == 1
    assert "\x1b[1A" not in file.getvalue()
