#!/usr/bin/env python
"""Seconds per step of every named algorithm against GRPO's.

    .venv/bin/python scripts/bench_algorithms.py [--steps 6] [--rounds 2] [--preset quickstart] [--kinds gspo dapo]

Each kind trains the first steps of the preset by `--set algorithm.kind=KIND` alone, in turn and in rounds. Of a run
the first step does not count; the table has medians over runs of the median step.
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
sys.path[:0] = [str(ROOT)]

from specs.load.keys import kind_of, tables_of  # noqa: E402
from specs.schema.algorithms.algorithm_tables import AlgorithmTable  # noqa: E402

KINDS = [kind_of(table) for table in tables_of(AlgorithmTable) if not table.advantage_table.needs_teacher]
TIMES = ("time/step_s", "time/rollout_s", "time/update_s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--preset", default="quickstart")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    args = parser.parse_args()
    kinds = list(dict.fromkeys(["grpo", *args.kinds]))
    with tempfile.TemporaryDirectory() as folder:
        spec = Path(folder, "spec.toml")
        spec.write_text((ROOT / "specs" / "presets" / f"{args.preset}.toml").read_text())
        runs = [(kind, run(spec, kind, args.steps, number)) for number in range(args.rounds) for kind in kinds]
    medians = {
        kind: {name: statistics.median(times[name] for other, times in runs if other == kind) for name in TIMES}
        for kind in kinds
    }
    print("| kind | step | rollout | update | step against GRPO's | update against GRPO's |\n|---|---|---|---|---|---|")
    for kind, found in medians.items():
        step, rollout, update = (found[name] for name in TIMES)
        against = [found[name] / medians["grpo"][name] for name in ("time/step_s", "time/update_s")]
        print(f"| `{kind}` | {step:.2f} s | {rollout:.2f} s | {update:.2f} s | {against[0]:.2f}× | {against[1]:.2f}× |")


def run(spec: Path, kind: str, steps: int, number: int) -> dict[str, float]:
    """Median times of the steps after the first."""
    out = spec.with_name(f"{kind}-{number}")
    options = [f"algorithm.kind={kind}", f"run.steps={steps}", "eval.every=1000", "checkpoint.every=1000"]
    command = [sys.executable, "-m", "rlctl", "train", str(spec), "--run-dir", str(out)]
    command += [word for option in options for word in ("--set", option)]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    counted = [line for line in lines if line["step"] > 1]
    return {name: statistics.median(line[name] for line in counted) for name in TIMES}


if __name__ == "__main__":
    main()
