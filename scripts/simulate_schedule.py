#!/usr/bin/env python
"""What idles in a run, and what other replicas or staleness would change, from the seconds of its steps.

    .venv/bin/python scripts/simulate_schedule.py --rollout-s 40 --train-s 25 --sync-s 3 --replicas 4
    .venv/bin/python scripts/simulate_schedule.py --run RUN --replicas 4

The driver's own queue (`rlctl/loop/sample_queue.py`) decides what goes out when, on a clock that only counts. Rollouts
and trainers are taken to have devices of their own, and as many replicas to be as much faster: where they share cores
or where one long completion is waited for, a run gains less. `--run` takes the medians of a run without staleness.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rlctl.loop.sample_queue import SampleQueue

STALENESS = (0, 1, 2, 4)
WORTH = 1.05  # a change that makes a step less than so much faster is none


@dataclass(frozen=True)
class Times:
    """Seconds of a step: sampling with one replica, learning with all else that the driver waits for, a sync."""

    rollout_s: float
    train_s: float
    sync_s: float


@dataclass
class Clock:
    """The time now; and when the rollouts are done with what they were given."""

    now: float = 0.0
    rollout_free: float = 0.0
    rollout_busy: float = 0.0

    def wait(self, until: float) -> None:
        self.now = max(self.now, until)


@dataclass
class Generation:
    """A batch that is being sampled."""

    clock: Clock
    ready: float

    def wait(self) -> None:
        self.clock.wait(self.ready)

    def finish(self) -> Any:
        self.wait()
        return self

    batch: tuple[()] = ()

    def fresh(self, version: int, max_staleness: int) -> Generation:
        return self


@dataclass
class Sampler:
    """In the place of `rlctl.loop.sampling.Sampler`: a batch takes `seconds`, one after the other."""

    clock: Clock
    seconds: float
    started: list[int] = field(default_factory=list)

    def ask(self, position: int, count: int, step: int) -> Any:
        answer = SimpleNamespace(body={"position": position + count, "rows": {}}, count=count)
        return SimpleNamespace(result=lambda: [answer])

    def training_prompts(self, answer: Any) -> Any:
        return SimpleNamespace(batch=range(answer.count), select=lambda chosen: chosen)

    def training(self) -> None: ...

    def start(self, prompts: Any, sampling: None, step: int, *, show: int) -> Generation:
        clock = self.clock
        clock.rollout_free = max(clock.now, clock.rollout_free) + self.seconds
        clock.rollout_busy += self.seconds
        return Generation(clock, clock.rollout_free)


def schedule(times: Times, replicas: int, staleness: int, steps: int = 60) -> dict[str, float]:
    """Seconds of a step, and the shares of the time in which each side waits."""
    clock = Clock()
    spec = SimpleNamespace(
        rollout=SimpleNamespace(max_staleness=staleness),
        run=SimpleNamespace(steps=steps),
        algorithm=SimpleNamespace(dynamic_sampling=False),
        data=SimpleNamespace(prompts_per_step=1),
        weights_version=lambda step: step,
    )
    queue = SampleQueue(cast("Any", spec), cast("Any", Sampler(clock, times.rollout_s / replicas)))
    clock.now += times.sync_s
    for step in range(1, steps + 1):
        queue.take(step)
        clock.now += times.train_s
        if queue.needs_weights(step):
            queue.wait_until_sampled()
            clock.now += times.sync_s
        queue.trained()
    return {
        "step_s": round(clock.now / steps, 3),
        "rollout_idle": round(1 - clock.rollout_busy / clock.now, 3),
        "trainer_idle": round(1 - steps * times.train_s / clock.now, 3),
    }


def advice(times: Times, replicas: int) -> str:
    """What to change, the least that is worth it first, and what then still waits."""
    now = schedule(times, replicas, 0)["step_s"]

    def faster(replicas: int, staleness: int) -> float:
        return now / schedule(times, replicas, staleness)["step_s"]

    staleness = 0
    for more in STALENESS[1:]:
        if faster(replicas, more) < WORTH * faster(replicas, staleness):
            break
        staleness = more
    gained, left = faster(replicas, staleness), schedule(times, replicas, staleness)
    said = (
        f"rollout.max_staleness = {staleness}: {gained:.2f}× as fast as now"
        if staleness
        else "no staleness is worth it"
    )
    said += f"; trainers then wait {left['trainer_idle']:.0%} of the time, rollouts {left['rollout_idle']:.0%}"
    if (twice := faster(2 * replicas, staleness)) > WORTH * gained:
        return f"{said}. With {2 * replicas} replicas {twice:.2f}×"
    half = replicas // 2
    if half and gained < WORTH * faster(half, staleness):
        return f"{said}. {half} replica{'s' * (half > 1)} would do: {faster(half, staleness):.2f}×"
    return f"{said}. More replicas add nothing"


def times_of(run: Path, replicas: int) -> Times:
    """Medians of a run's steps, the first apart. Raises SystemExit where they do not tell."""
    try:
        lines = (run / "metrics.jsonl").read_text().splitlines()
        resolved = json.loads((run / "resolved.json").read_text())
    except OSError as error:
        raise SystemExit(f"--run {run}: {error.filename}: {error.strerror}") from None
    if resolved["rollout"]["max_staleness"]:
        raise SystemExit(f"--run {run}: it ran ahead (rollout.max_staleness above 0), so its times overlap")
    steps = [step for step in map(json.loads, lines) if step.get("step", 0) > 1]
    if not steps:
        raise SystemExit(f"--run {run}: it has no step after the first, which is not counted")

    def middle(key: str) -> float:
        return statistics.median(step[key] for step in steps)

    rollout_s, sync_s = middle("time/rollout_s"), middle("time/sync_s")
    return Times(rollout_s * replicas, middle("time/wall_s") - rollout_s - sync_s, sync_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--run", type=Path)
    parser.add_argument("--rollout-s", type=float, default=0.0, help="of a step, with the replicas that there are")
    parser.add_argument("--train-s", type=float, default=0.0)
    parser.add_argument("--sync-s", type=float, default=0.0)
    parser.add_argument("--replicas", type=int, default=1)
    args = parser.parse_args()
    given = Times(args.rollout_s * args.replicas, args.train_s, args.sync_s)
    if not args.run and min(args.rollout_s, args.train_s) <= 0:
        parser.error("name a --run, or --rollout-s and --train-s of a step")
    if args.replicas < 1:
        parser.error("--replicas: at least 1")
    times = times_of(args.run, args.replicas) if args.run else given
    print("replicas  staleness   step_s   against now   rollouts idle   trainers idle")
    now = schedule(times, args.replicas, 0)["step_s"]
    for replicas in sorted({max(1, args.replicas // 2), args.replicas, 2 * args.replicas}):
        for staleness in STALENESS:
            found = schedule(times, replicas, staleness)
            idle = f"{found['rollout_idle']:>13.0%}   {found['trainer_idle']:>13.0%}"
            print(f"{replicas:>8}  {staleness:>9}  {found['step_s']:>7.3g}  {now / found['step_s']:>11.2f}×  {idle}")
    print(advice(times, args.replicas))


if __name__ == "__main__":
    main()
