#!/usr/bin/env python
"""What a flood of strangers at the driver's door costs a run.

    .venv/bin/python scripts/bench_flood.py [--window-s 20] [--between-s 20] [--rounds 3] [--kinds hello stream]

One run trains on. By turns it is left alone, two processes flood a port that is nobody's (their own use of the cores),
and two processes flood the driver (tests/support/flood.py). Afterwards the same steps run undisturbed, and must give
the same numbers.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

KINDS = ("hello", "stream", "key", "idle")  # see tests/support/flood.py
NUMBERS = ("step", "reward/mean", "actor/loss", "actor/grad_norm", "rollout/logprob_gap")
KEEP_GOING = ("run.steps=1000000", "checkpoint.every=1000000", "eval.every=1000000")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--window-s", type=float, default=20.0)
    parser.add_argument(
        "--between-s", type=float, help="windows in which the driver is not flooded; as long unless said"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kinds", nargs=2, choices=KINDS, default=["hello", "stream"])
    parser.add_argument("--preset", default="quickstart")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        spec = Path(folder, "spec.toml")
        spec.write_text((ROOT / "specs" / "presets" / f"{args.preset}.toml").read_text())
        flooded, alone = Path(folder, "flooded"), Path(folder, "alone")
        paces, costs = disturbed(spec, flooded, args)
        steps = len(numbers(flooded))
        with training(spec, alone) as process:
            wait_for_steps(process, alone, steps)
        same = numbers(flooded) == numbers(alone)[:steps]
    quiet, nobody, driver = (statistics.median(paces[where]) for where in ("quiet", "nobody", "driver"))
    report = {
        "kinds": args.kinds,
        "flooded_s": args.window_s * args.rounds,
        "steps_per_s": {where: [round(pace, 3) for pace in found] for where, found in paces.items()},
        "driver_cpu_ms_per_step": {where: [round(cost, 2) for cost in found] for where, found in costs.items()},
        "pace_flooded_to_quiet": round(driver / quiet, 3),
        "pace_flooded_to_nobody": round(driver / nobody, 3),
        "steps": steps,
        "numbers_as_undisturbed": same,
    }
    print(json.dumps(report, indent=1))


def disturbed(spec: Path, run: Path, args: argparse.Namespace) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Steps per second in each window, and the driver's CPU milliseconds per step, whatever else the machine does."""
    from flood import flooded

    paces: dict[str, list[float]] = {"quiet": [], "nobody": [], "driver": []}
    costs: dict[str, list[float]] = {where: [] for where in paces}
    with socket.create_server(("127.0.0.1", 0)) as door, training(spec, run) as process:
        threading.Thread(target=swallow, args=(door,), daemon=True).start()
        wait_for_steps(process, run, 2)
        ports = {"quiet": 0, "nobody": door.getsockname()[1], "driver": port_of(process.pid)}
        for _ in range(args.rounds):
            for where, port in ports.items():
                window_s = args.window_s if where == "driver" or args.between_s is None else args.between_s
                with flooded(f"tcp://127.0.0.1:{port}", tuple(args.kinds) if port else (), window_s):
                    before, since = cpu_ms(process.pid), len(numbers(run))
                    paces[where].append(pace(run, window_s))
                    costs[where].append((cpu_ms(process.pid) - before) / max(1, len(numbers(run)) - since))
                assert process.poll() is None, "the run ended"
    return paces, costs


@contextmanager
def training(spec: Path, run: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A run that trains until the block ends."""
    sets = [word for setting in KEEP_GOING for word in ("--set", setting)]
    command = [sys.executable, "-m", "rlctl", "train", str(spec), "--run-dir", str(run), *sets]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(60)
        process.kill()


def wait_for_steps(process: subprocess.Popen[bytes], run: Path, count: int) -> None:
    while len(numbers(run)) < count:
        assert process.poll() is None, "the run ended"
        time.sleep(0.1)


def pace(run: Path, window_s: float) -> float:
    """Steps per second, between the first step that ends in the window and the last."""
    until, first = time.monotonic() + window_s, len(numbers(run))
    while (count := len(numbers(run))) == first and time.monotonic() < until:
        time.sleep(0.01)
    first, since = count, time.monotonic()
    latest, at = first, since
    while time.monotonic() < until:
        if (count := len(numbers(run))) > latest:
            latest, at = count, time.monotonic()
        time.sleep(0.01)
    return (latest - first) / (at - since) if latest > first else 0.0


def cpu_ms(pid: int) -> float:
    return 1e3 * float(sum(psutil.Process(pid).cpu_times()[:2]))


def port_of(pid: int) -> int:
    found = [each for each in psutil.Process(pid).net_connections("tcp") if each.status == psutil.CONN_LISTEN]
    return int(found[0].laddr.port)


def swallow(door: socket.socket) -> None:
    while True:
        with suppress(OSError):
            line = door.accept()[0]
            threading.Thread(target=read_on, args=(line,), daemon=True).start()


def read_on(line: socket.socket) -> None:
    with suppress(OSError), line:
        while line.recv(65536):
            pass


def numbers(run: Path) -> list[tuple[object, ...]]:
    """The metrics of each step so far; a last line may still be in the writing."""
    with suppress(OSError):
        lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
        found = [json.loads(line) for line in lines if line.endswith("\n")]
        return [tuple(line.get(key) for key in NUMBERS) for line in found if line["step"] > 0]
    return []


if __name__ == "__main__":
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    main()
