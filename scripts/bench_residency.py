#!/usr/bin/env python
"""Does the turn-taking of trainer and sampler leak? Memory of both processes over many cycles of a real run.

    .venv/bin/python scripts/bench_residency.py [--preset quickstart] [--cycles 50] [--set KEY=VALUE]…

Every step of a run with `run.colocate = "always"` is a cycle: wake, generate, sleep (level 2), onload, learn, verified
sync, offload. Prints, for what each role holds before and after it leaves the device (resident memory on the CPU), the
first and last value and the slope (Theil–Sen) after the warm-up.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rlctl.loop.memory_watch import WARM_UP, slope

ROOT = Path(__file__).resolve().parent.parent
ROWS = {
    "rollout, awake": "mem/rollout_before_sleep_GiB",
    "rollout, asleep": "mem/rollout_asleep_GiB",
    "actor, on the device": "mem/actor_before_offload_GiB",
    "actor, offloaded": "mem/actor_offloaded_GiB",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="quickstart")
    parser.add_argument("--cycles", type=int, default=50)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        run = Path(scratch) / "run"
        steps = asked.cycles + WARM_UP + 1  # the first step's sleep and offload are not a whole cycle
        sets = ['run.colocate="always"', f"run.steps={steps}", f"checkpoint.every={steps}", *asked.set]
        spec = ROOT / "specs" / "presets" / f"{asked.preset}.toml"
        command = [sys.executable, "-m", "rlctl", "train", str(spec), "--run-dir", str(run)]
        done = subprocess.run([*command, *(part for one in sets for part in ("--set", one))], cwd=ROOT, check=False)
        if done.returncode:
            return done.returncode
        print_slopes([json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()])
    return 0


def print_slopes(lines: list[dict[str, float]]) -> None:
    kept = [line for line in lines if line["step"] > WARM_UP + 1]
    print(f"\n{len(kept)} cycles, MiB          {'first':>9} {'last':>9} {'slope per cycle':>16}")
    for what, key in ROWS.items():
        held = [line[key] * 1024 for line in kept]
        print(f"{what:<24} {held[0]:>9.1f} {held[-1]:>9.1f} {slope(held):>16.3f}")


if __name__ == "__main__":
    sys.exit(main())
