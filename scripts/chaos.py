"""Faults in real runs, as many as are asked for: every process in every phase is killed, ended and stopped, terminals
hang up, disks are full, rewards are hostile. Each run must end or go on within its bound, name the cause, leave nothing
behind, and reach the numbers of the undisturbed run, by itself or by `--resume`. Exit code 1 if one does not.

    scripts/chaos                         160 faults on fake and ddp
    scripts/chaos --short                 a few, in about 20 s
    scripts/chaos --engines fsdp2,zero --faults 40 --seed 7
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

from chaos_faults import Fault, chosen  # noqa: E402
from chaos_runs import ENGINES, LAUNCHED, Line, Stage, try_fault  # noqa: E402
from rich.table import Table  # noqa: E402
from rich.text import Text  # noqa: E402

from rlctl.show.screen import Screen  # noqa: E402

SHORT = [
    Fault("fake", "rollout", "SIGKILL", "rollout 1"),
    Fault("fake", "train", "SIGTERM", "actor 0"),
    Fault("fake", "save", "Ctrl-C ×2", "driver"),
    Fault("fake", "every step", "escapes", "rewards"),
]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="a few faults on fake")
    parser.add_argument("--engines", default="fake,ddp", help=f"of {', '.join(ENGINES)}; the first gets most faults")
    parser.add_argument("--faults", type=int, default=160)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=60.0, help="no further fault is begun after so long")
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time; most of each is waiting")
    asked = parser.parse_args(argv)
    engines = ["fake"] if asked.short else asked.engines.split(",")
    faults = SHORT if asked.short else chosen(engines, LAUNCHED, asked.faults, asked.seed)
    screen = Screen(width=None if sys.stdout.isatty() else 220)
    folder = Path(tempfile.mkdtemp(prefix="rlctl-chaos-"))
    started = time.monotonic()
    lines = try_all(faults, engines, folder, started + 60 * asked.minutes, asked.jobs, screen)
    screen.print(table_of(lines))
    screen.print(totals(lines, faults, time.monotonic() - started))
    bad = [line for line in lines if line.bad]
    if bad:
        screen.print(Text(f"{len(bad)} are bad", style="red"), f"what they left: {folder}", sep="; ")
    else:
        shutil.rmtree(folder)
    return 1 if bad or len(lines) < len(faults) else 0


def try_all(
    faults: Sequence[Fault], engines: Sequence[str], folder: Path, until: float, jobs: int, screen: Screen
) -> list[Line]:
    stages = {engine: Stage(engine, folder / engine) for engine in engines}

    def try_one(number: int) -> Line | None:
        if time.monotonic() > until:
            return None
        line = try_fault(stages[faults[number].engine], faults[number], folder / f"{number:03d}")
        if line.bad or not sys.stdout.isatty():
            told = "  ".join((f"{number + 1}/{len(faults)}", *cells(line)))
            screen.print(told, soft_wrap=True)
            sys.stdout.flush()
        return line

    with ThreadPoolExecutor(jobs) as pool:
        return [line for line in pool.map(try_one, range(len(faults))) if line is not None]


def cells(line: Line) -> list[str]:
    fault = line.fault
    what = f"{fault.kind} {fault.victim}".strip()
    left = line.leftovers or "none"
    found = [what, fault.phase, fault.engine, line.outcome, f"{line.seconds:.1f}", line.named, left]
    return [*found, "; ".join(line.bad) or "✓"]


def table_of(lines: Sequence[Line]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False, expand=True)
    for name in ("fault", "phase", "engine", "outcome", "s", "named", "leftovers", ""):
        share = {"named": 3, "leftovers": 1, "outcome": 1}.get(name)
        table.add_column(name, no_wrap=True, ratio=share, justify="right" if name == "s" else "left")
    for line in sorted(lines, key=lambda line: (not line.bad, line.fault.engine, line.fault.phase, line.fault.kind)):
        table.add_row(*cells(line), style="red" if line.bad else "")
    return table


def totals(lines: Sequence[Line], faults: Sequence[Fault], seconds: float) -> str:
    outcomes = Counter(line.outcome for line in lines)
    slowest = max((line.seconds for line in lines), default=0.0)
    listed = "\n".join(f"{count:5d}  {outcome}" for outcome, count in outcomes.most_common())
    head = f"{len(lines)} of {len(faults)} faults in {seconds / 60:.1f} min"
    return f"{head}; at most {slowest:.1f} s from a fault to the end of its run\n{listed}"


if __name__ == "__main__":
    sys.exit(main())
