#!/usr/bin/env python
"""What the channel costs: an empty verb to several ranks and back, and large tensors out and back.

    .venv/bin/python scripts/bench_channel.py [--ranks 4] [--calls 500] [--MiB 84] [--rounds 5]

Real processes on this machine. The first round of each is a warm-up and not counted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SUPPORT = ROOT / "tests" / "support"
sys.path[:0] = [str(ROOT), str(SUPPORT)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--calls", type=int, default=500)
    parser.add_argument("--MiB", type=float, default=84.0)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    import numpy as np
    from probe_groups import probe_groups, role_plan

    from specs.wire.messages import Verb

    big = {"x": np.random.default_rng(0).random(int(args.MiB * 2**20) // 8)}
    plans = (role_plan("actor", args.ranks), role_plan("rollout", 1))
    with tempfile.TemporaryDirectory() as folder, probe_groups(Path(folder), *plans) as groups:
        empty_s = seconds(lambda: groups["actor"].call(Verb.PING), args.calls)
        large_s = seconds(lambda: groups["rollout"].call(Verb.PING, tensors=big), args.rounds)
    report = {
        "ranks": args.ranks,
        "empty_verb_ms": round(1e3 * statistics.median(empty_s), 3),
        "empty_verb_p90_ms": round(1e3 * statistics.quantiles(empty_s, n=10)[-1], 3),
        "MiB": args.MiB,
        "out_and_back_s": round(statistics.median(large_s), 3),
        "out_and_back_GB_per_s": round(2 * big["x"].nbytes / statistics.median(large_s) / 1e9, 3),
    }
    print(json.dumps(report, indent=1))


def seconds(work: Callable[[], object], times: int) -> list[float]:
    """Wall-clock seconds of each call but the first."""
    taken = []
    for _ in range(times + 1):
        started = time.perf_counter()
        work()
        taken.append(time.perf_counter() - started)
    return taken[1:]


if __name__ == "__main__":
    main()
