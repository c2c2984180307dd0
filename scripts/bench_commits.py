#!/usr/bin/env python
"""A run at two commits, by turns: seconds per step, CPU per process, and whether both learn the same to the last digit.

    .venv/bin/python scripts/bench_commits.py 4bd57a9                          the quickstart, against the working tree
    .venv/bin/python scripts/bench_commits.py main~20 --presets fake ppo-cpu --rounds 1
    .venv/bin/python scripts/bench_commits.py v0.1.0 --set run.steps=8 --set actor.engine.kind=zero3

Both sides read the spec that the older commit ships, run in this interpreter with the packages of their own tree, and
take turns, so that both see the same machine. The first three steps of a run are not counted. Times are medians of the
steps and then of the runs; the ratio is the median over rounds of the working tree by the commit. CPU is that of each
role's processes between the same two steps. Metrics of time, speed and memory are not compared; all others must be
equal in every step that both have, else the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from specs.schema.roles import ROLES

ROOT = Path(__file__).resolve().parent.parent
WARM_UP = 3  # steps
MEASURED = re.compile(r"^(time|perf|mem)/|_s$|_GiB$|wait|utilization")


@dataclass
class Run:
    """Hold what one run left: its metrics by step, and CPU seconds per counted step of each role."""

    metrics: dict[int, dict[str, Any]] = field(default_factory=dict)
    cpu_s: dict[str, float] = field(default_factory=dict)

    @property
    def step_s(self) -> float:
        return statistics.median(line["time/step_s"] for step, line in self.metrics.items() if step > WARM_UP)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit")
    parser.add_argument("--presets", nargs="+", default=["quickstart"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    args = parser.parse_args()
    same = True
    with tempfile.TemporaryDirectory() as folder, checked_out(args.commit, Path(folder, "tree")) as tree:
        for preset in args.presets:
            spec = Path(folder, f"{preset}.toml")
            spec.write_text((tree / "specs" / "presets" / f"{preset}.toml").read_text())
            overrides = [f"run.steps={args.steps}", *args.set]
            sides: dict[Path, list[Run]] = {tree: [], ROOT: []}
            for number in range(args.rounds):
                # Who begins changes with the round: a machine that slows down is not held against one side.
                for side, runs in list(sides.items())[:: -1 if number % 2 else 1]:
                    runs.append(train(side, spec, overrides, Path(folder, f"{preset}-{side.name}-{number}")))
                    print(
                        f"{preset}, round {number + 1}, {side.name}: {runs[-1].step_s:.3f} s per step", file=sys.stderr
                    )
            same &= report(preset, args.commit, sides[tree], sides[ROOT])
    return 0 if same else 1


@contextmanager
def checked_out(commit: str, tree: Path) -> Iterator[Path]:
    """Make a tree of `commit` for as long as it is needed, and put this checkout's environments beside the specs."""
    subprocess.run(["git", "worktree", "add", "--quiet", "--detach", tree, commit], cwd=ROOT, check=True)
    for environment in ROOT.glob(".venv*"):
        if environment.is_dir():
            (tree.parent / environment.name).symlink_to(environment.resolve())
    try:
        yield tree
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=True)


def train(side: Path, spec: Path, overrides: list[str], out: Path) -> Run:
    command = [sys.executable, "-m", "rlctl", "train", str(spec), "--run-dir", str(out)]
    command += [word for override in overrides for word in ("--set", override)]
    with open(f"{out}.log", "w") as log:
        process = subprocess.Popen(
            command, cwd=side, env={**os.environ, "PYTHONPATH": str(side)}, stdout=log, stderr=subprocess.STDOUT
        )
        run = Run(cpu_s=cpu_between_steps(psutil.Process(process.pid), out / "metrics.jsonl"))
        if process.wait() != 0:
            raise SystemExit(f"{side.name} failed:\n{Path(f'{out}.log').read_text()[-3000:]}")
    run.metrics = {line["step"]: line for line in map(json.loads, (out / "metrics.jsonl").read_text().splitlines())}
    return run


def cpu_between_steps(driver: psutil.Process, metrics: Path) -> dict[str, float]:
    """CPU seconds per step of each role, from the end of the warm-up to the last step that was seen."""
    first: tuple[int, Mapping[str, float]] | None = None
    last: tuple[int, Mapping[str, float]] | None = None
    seen = 0
    while driver.is_running() and driver.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.02)
        steps = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
        if steps > seen:
            seen = steps
            if steps >= WARM_UP:
                last = steps, cpu_by_role(driver)
                first = first or last
    if first is None or last is None or first[0] == last[0]:
        return {}
    return {role: (last[1].get(role, 0.0) - used) / (last[0] - first[0]) for role, used in first[1].items()}


def cpu_by_role(driver: psutil.Process) -> dict[str, float]:
    """Return the CPU seconds so far of the driver and of each role's processes."""
    used: dict[str, float] = defaultdict(float)
    with suppress(psutil.Error):
        used["driver"] += sum(driver.cpu_times()[:2])
        for child in driver.children(recursive=True):
            with suppress(psutil.Error):
                used[role_of(child)] += sum(child.cpu_times()[:2])
    return dict(used)


def role_of(process: psutil.Process) -> str:
    """Return the role in a command line, `… workers.main --role actor …`; "other" for launchers and helpers."""
    return next((word for word in process.cmdline() if word in ROLES), "other")


def report(preset: str, commit: str, before: list[Run], after: list[Run]) -> bool:
    """Print the tables; return whether both sides have the same metrics."""
    old, new = (statistics.median(run.step_s for run in runs) for runs in (before, after))
    ratio = statistics.median(mine.step_s / theirs.step_s for theirs, mine in zip(before, after, strict=True))
    print(f"\n{preset}: {old:.3f} s per step at {commit}, {new:.3f} s now, ratio {ratio:.3f}")
    for role in dict.fromkeys(role for run in (*before, *after) for role in run.cpu_s):
        theirs, mine = (statistics.median(run.cpu_s.get(role, 0.0) for run in runs) for runs in (before, after))
        by = f"{mine / theirs:6.2f}" if theirs else "     –"
        print(f"  CPU of {role:<13} {theirs * 1e3:7.1f} ms → {mine * 1e3:7.1f} ms  {by}")
    return same_metrics(before[0].metrics, after[0].metrics)


def same_metrics(before: Mapping[int, Mapping[str, Any]], after: Mapping[int, Mapping[str, Any]]) -> bool:
    steps = sorted(before.keys() & after.keys())
    names = {name for step in steps for name in before[step].keys() & after[step].keys() if not MEASURED.search(name)}
    different = {
        name: next(step for step in steps if before[step].get(name) != after[step].get(name))
        for name in sorted(names)
        if any(before[step].get(name) != after[step].get(name) for step in steps)
    }
    print(f"  {len(names) - len(different)} of {len(names)} metrics equal to the last digit over {len(steps)} steps")
    for name, step in different.items():
        print(f"    {name}: from step {step} on: {before[step].get(name)} → {after[step].get(name)}")
    return bool(names) and not different


if __name__ == "__main__":
    sys.exit(main())
