#!/usr/bin/env python
"""What sampling ahead of learning saves: seconds per step with `rollout.max_staleness` 0 and n, taking turns.

    .venv/bin/python scripts/bench_run_ahead.py [--preset quickstart] [--ahead 1] [--rounds 3] [--steps 14] [--set K=V]…

Actor and rollout get one core each in both, as if each had devices of its own: without running ahead one of them idles.
Prints the median over the steps of each run (without the first two and the last), where the step waited, and the ratio
of each round. Runs of a round follow each other at once, so that what else the machine does weighs on both.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHOWN = {"s/step": "time/step_s", "waits": "time/rollout_s", "update": "time/update_s", "overlap": "rollout/overlap_s"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="quickstart")
    parser.add_argument("--ahead", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    asked = parser.parse_args()
    print(f"{'':<18}" + "".join(f"{name:>10}" for name in SHOWN))
    ratios = []
    for number in range(1, asked.rounds + 1):
        seconds = []
        for ahead in (0, asked.ahead):
            medians = measure(asked, ahead)
            seconds.append(medians["s/step"])
            print(
                f"round {number}, {ahead} ahead  " + "".join(f"{value:>10.3f}" for value in medians.values()),
                flush=True,
            )
        ratios.append(seconds[0] / seconds[1])
    print(f"0 ahead / {asked.ahead} ahead: {', '.join(f'{ratio:.2f}' for ratio in ratios)}")
    return 0


def measure(asked: argparse.Namespace, ahead: int) -> dict[str, float]:
    """Medians of one run."""
    sets = [f"rollout.max_staleness={ahead}", f"run.steps={asked.steps}", "actor.threads=1", "rollout.threads=1"]
    spec = ROOT / "specs" / "presets" / f"{asked.preset}.toml"
    with tempfile.TemporaryDirectory() as scratch:
        run = Path(scratch) / "run"
        command = [sys.executable, "-m", "rlctl", "train", str(spec), "--run-dir", str(run)]
        options = [part for one in [*sets, *asked.set] for part in ("--set", one)]
        subprocess.run([*command, *options], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kept = [line for line in lines if 2 < line["step"] < asked.steps]
    return {name: statistics.median(line.get(key, 0.0) for line in kept) for name, key in SHOWN.items()}


if __name__ == "__main__":
    sys.exit(main())
