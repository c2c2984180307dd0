#!/usr/bin/env python
"""The real driver, channel and schedule against ranks that only answer: what hundreds of them cost the driver.

    .venv/bin/python scripts/simulate.py [--ranks 512] [--trainers 64] [--tokens 1000000] [--steps 1000]

One process plays all ranks of a role (`_simulated_ranks.py`). `--profile` prints where the driver's time goes.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import pstats
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import psutil

from rlctl.processes.groups import Group, Groups
from rlctl.processes.placement import Plan, RolePlan
from specs.wire import partition
from specs.wire.batch import Batch
from specs.wire.bodies import Logprobs
from specs.wire.messages import COLUMNS, Verb
from specs.wire.sequence_work import SequenceWork

ROOT = Path(__file__).resolve().parent.parent
MAX_SEQUENCE, WARM_UP = 4096, 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--ranks", type=int, default=512, help="of the role that gets empty verbs")
    parser.add_argument("--trainers", type=int, default=64, help="ranks that the batch goes to")
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1000, help="over which the driver's memory is watched")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    plans = simulated("rollout", args.ranks), simulated("actor", args.trainers)
    with tempfile.TemporaryDirectory() as folder, Groups(Plan(plans, colocated=False), Path(folder)) as groups:
        started = time.perf_counter()
        groups.start()
        report: dict[str, Any] = {"ranks": args.ranks, "joined_s": round(time.perf_counter() - started, 2)}
        batch = batch_of(args.tokens)
        worked_s = time.thread_time()
        empty = measured(lambda: groups["rollout"].call(Verb.PING), args.calls, profile=args.profile)
        worked_s = (time.thread_time() - worked_s) / (args.calls + WARM_UP)
        report["empty_verb_ms"] = {**percentiles(empty), "driver_computes": round(1e3 * worked_s, 2)}
        out = measured(lambda: logprobs(groups["actor"], batch), args.rounds, profile=args.profile)
        report |= {"trainers": args.trainers, "tokens": batch.num_tokens, "sequences": len(batch)}
        report["batch_out_and_back_s"] = {"median": round(statistics.median(out), 3), "worst": round(max(out), 3)}
        report["driver_memory"] = watched(groups, batch_of(args.tokens // 20), args.steps)
    print(json.dumps(report, indent=1))


def simulated(role: Any, count: int) -> RolePlan:
    """A role whose ranks one process plays, as below a launcher."""
    command = (sys.executable, str(ROOT / "scripts" / "_simulated_ranks.py"), role, str(count))
    return RolePlan(role, count, "torchrun", sys.executable, command, {}, (), 1, 1)


def batch_of(tokens: int) -> Batch:
    """Samples of ragged length, in groups of eight with a prompt of their own."""
    rng = np.random.default_rng(0)
    lengths: list[int] = []
    while sum(lengths) < tokens:
        lengths.append(int(rng.integers(64, MAX_SEQUENCE)))
    length_B = np.array(lengths)
    group_B = np.arange(len(length_B)) // 8
    tokens_T = rng.integers(0, 50_000, length_B.sum())
    mask_T = np.ones(len(tokens_T), dtype=np.int64)
    mask_T[np.cumsum(length_B)[:-1]] = 0
    mask_T[0] = 0
    identity = {"group_B": group_B, "rollout_B": np.arange(len(length_B)), "id_B": np.arange(len(length_B))}
    return Batch({"tokens_T": tokens_T, "length_B": length_B, "loss_mask_T": mask_T, "row_B": group_B, **identity})


def logprobs(group: Group, batch: Batch) -> None:
    """A batch out to all ranks and their column back, as the driver's loop does it."""
    shards = partition.shards(SequenceWork.of(batch, size=None, share_prompts=True), group.size)
    needed = batch.only(COLUMNS[Verb.LOGPROBS].needs)
    tensors = [needed.select(shard).columns for shard in shards]
    answers = group.call(Verb.LOGPROBS, Logprobs(adapters=True), tensors)
    out_T = np.zeros(batch.num_tokens, dtype=np.float32)
    for answer, shard in zip(answers, shards, strict=True):
        out_T[batch.token_index(shard)] = answer.tensors["logprob_T"]


def watched(groups: Groups, batch: Batch, steps: int) -> dict[str, float]:
    """MiB that the driver holds after a tenth, half and all of the steps."""
    process, seen = psutil.Process(), {"steps": float(steps)}
    for step in range(1, steps + 1):
        groups["rollout"].call(Verb.PING, step=step)
        logprobs(groups["actor"], batch)
        groups.take_busy()
        if step in (steps // 10, steps // 2, steps):
            gc.collect()
            seen[f"MiB_after_{step}"] = round(process.memory_info().rss / 2**20, 1)
    return seen


def measured(work: Callable[[], object], times: int, *, profile: bool) -> list[float]:
    """Seconds of each call after the warm-up."""
    taken, profiler = [], cProfile.Profile()
    for number in range(times + WARM_UP):
        started = time.perf_counter()
        if profile and number >= WARM_UP:
            profiler.enable()
        work()
        profiler.disable()
        taken.append(time.perf_counter() - started)
    if profile:
        pstats.Stats(profiler, stream=sys.stderr).sort_stats("tottime").print_stats(18)
    return taken[WARM_UP:]


def percentiles(seconds: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(seconds, n=100)
    return {f"p{share}": round(1e3 * cuts[share - 1], 2) for share in (10, 50, 90, 99)}


if __name__ == "__main__":
    main()
