"""Put faults into real runs: every process in every phase is killed, ended and stopped. Each run must end or continue
within its bound, name the cause, leave nothing behind, and reach the numbers of the undisturbed run, by itself or by
`--resume`. Exit code 1 if one does not.

    scripts/chaos                         160 faults on fake and ddp
    scripts/chaos --faults 4 --engines fake
    scripts/chaos --engines fsdp2,zero --faults 40 --seed 7
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

from chaos_runs import ENGINES, Line, Stage, chosen, try_fault  # noqa: E402


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", default="fake,ddp", help=f"of {', '.join(ENGINES)}")
    parser.add_argument("--faults", type=int, default=160)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time; most of each is waiting")
    asked = parser.parse_args(argv)
    folder, started = Path(tempfile.mkdtemp(prefix="rlctl-chaos-")), time.monotonic()
    stages = {engine: Stage(engine, folder / engine) for engine in asked.engines.split(",")}
    faults = chosen([*stages], asked.faults, asked.seed)

    def try_one(number: int) -> Line:
        fault = faults[number]
        line = try_fault(stages[fault.engine], fault, folder / f"{number:03d}")
        what = f"{fault.engine:6} {fault.phase:8} {fault.kind:8} {fault.victim:10}"
        end = f"{line.outcome}; {line.named}" if not line.bad else f"BAD: {'; '.join(line.bad)}"
        print(f"{number + 1:3}/{len(faults)}  {what} {line.seconds:6.1f} s  {end}", flush=True)
        return line

    with ThreadPoolExecutor(asked.jobs) as pool:
        lines = [*pool.map(try_one, range(len(faults)))]
    bad = sum(bool(line.bad) for line in lines)
    slowest = max((line.seconds for line in lines), default=0.0)
    print(f"{len(lines)} faults in {(time.monotonic() - started) / 60:.1f} min, the slowest took {slowest:.1f} s")
    print(f"{bad} are bad" + (f"; what they left: {folder}" if bad else ""))
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
