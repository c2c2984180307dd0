"""Run the parts of scripts/prove-gpu, each in a process of its own and under a time limit; print one table."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from _gpu_parts import PARTS, Part, Size, full_size, toy_size  # noqa: E402
from rich.table import Column, Table  # noqa: E402

from rlctl.show.screen import Screen  # noqa: E402
from rlctl.show.streams import visible_streams  # noqa: E402

VERSIONS = ("torch", "transformers", "vllm", "flash-attn", "numpy", "pydantic")


@dataclass(frozen=True)
class Outcome:
    """`state`: "passed", "failed", "skipped", "timed out"."""

    part: str
    state: str
    seconds: float
    about: str  # of a part that did not pass: why
    figures: Mapping[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(prog="prove-gpu", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "prove-gpu", help="folder of the results")
    parser.add_argument("--only", action="append", choices=[part.name for part in PARTS], help="may be repeated")
    parser.add_argument("--rehearse", action="store_true", help="toy sizes on the CPU: shows that the parts work")
    parser.add_argument("--again", action="store_true", help="also what has passed here before")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    options = parser.parse_args()
    size = toy_size() if options.rehearse else full_size()
    if options.part:
        return compute(options.part, size, options.out)
    if not options.rehearse and (why := no_gpu()):
        print(f"No GPU here: {why}. Nothing of what this proves can be shown on the CPU.")
        print("--rehearse runs the same parts at toy size.")
        return 0
    return prove([part for part in PARTS if not options.only or part.name in options.only], size, options)


def no_gpu() -> str | None:
    import torch

    if torch.cuda.is_available():
        return None
    built = "this build of torch has no CUDA" if torch.version.cuda is None else "torch finds no device"
    return f"{built} (torch {torch.__version__})"


def compute(name: str, size: Size, out: Path) -> int:
    """Run one part in this process, and write what it found."""
    part = next(part for part in PARTS if part.name == name)
    figures = part.run(size, out / name)
    (out / f"{name}.figures.json").write_text(json.dumps(figures, indent=2))
    return 0


def prove(parts: list[Part], size: Size, options: argparse.Namespace) -> int:
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    about = machine(size)
    before = {} if options.again else passed_before(out, about)
    outcomes = []
    for part in parts:
        outcomes.append(before.get(part.name) or attempt(part, options))
        print(line_of(outcomes[-1]), flush=True)
    all_parts = {**before, **{outcome.part: outcome for outcome in outcomes}}
    record = {"machine": about, "parts": {name: vars(outcome) for name, outcome in all_parts.items()}}
    (out / "prove-gpu.json").write_text(json.dumps(record, indent=2) + "\n")
    show(about, outcomes)
    print(f"\nAll figures: {out / 'prove-gpu.json'}")
    optional = {part.name for part in parts if part.optional}
    bad = [o for o in outcomes if o.state != "passed" and not (o.state == "skipped" and o.part in optional)]
    if bad:
        print(f"Not proven: {', '.join(outcome.part for outcome in bad)}. What each printed: {out}/PART.log.")
        print("The same command tries these again, and not what has passed.")
    return 1 if bad else 0


def passed_before(out: Path, about: Mapping[str, Any]) -> dict[str, Outcome]:
    """Return what passed in an earlier call into this folder, on the same device and versions."""
    try:
        record = json.loads((out / "prove-gpu.json").read_text())
    except FileNotFoundError:
        return {}
    found = [Outcome(**part) for part in record["parts"].values()] if record["machine"] == about else []
    return {outcome.part: outcome for outcome in found if outcome.state == "passed"}


def attempt(part: Part, options: argparse.Namespace) -> Outcome:
    out: Path = options.out
    if why := part.skip():
        return Outcome(part.name, "skipped", 0.0, why, {})
    print(f"… {part.name}: {part.about} (at most {part.limit_s:.0f} s)", flush=True)
    figures = out / f"{part.name}.figures.json"
    figures.unlink(missing_ok=True)
    command = [sys.executable, __file__, "--part", part.name, "--out", str(out)]
    command += ["--rehearse"] if options.rehearse else []
    started = time.monotonic()
    with (out / f"{part.name}.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, cwd=ROOT)
        try:
            code: int | None = process.wait(part.limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            kill_group(process)
    seconds = time.monotonic() - started
    found = json.loads(figures.read_text()) if figures.exists() else {}
    if code is None:
        return Outcome(part.name, "timed out", seconds, f"not done within {part.limit_s:.0f} s", found)
    if code or found.get("failed"):
        return Outcome(part.name, "failed", seconds, str(found.get("failed") or last_line(out, part)), found)
    return Outcome(part.name, "passed", seconds, "", found)


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """End the part and all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def last_line(out: Path, part: Part) -> str:
    lines = [line for line in (out / f"{part.name}.log").read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip()[:200] if lines else "it printed nothing"


def machine(size: Size) -> dict[str, Any]:
    """Return what the figures hold for: device, versions, size."""
    import torch

    found: dict[str, Any] = {"device": size.device_name(), "python": platform.python_version(), "size": size.name}
    for name in VERSIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    found["cuda"] = torch.version.cuda
    return found


def line_of(outcome: Outcome) -> str:
    return (
        f"{outcome.part:<14} {outcome.state} ({outcome.seconds:.0f} s){': ' + outcome.about if outcome.about else ''}"
    )


def show(about: Mapping[str, Any], outcomes: list[Outcome]) -> None:
    print(f"\n{about['device']}, torch {about.get('torch')}, transformers {about.get('transformers')}")
    table = Table("part", "state", Column("figure", overflow="fold"), "value")
    for outcome in outcomes:
        part = next(part for part in PARTS if part.name == outcome.part)
        figures = list(part.rows(outcome.figures)) if outcome.state == "passed" else [("", outcome.about)]
        table.add_section()
        for number, (name, value) in enumerate(figures or [("", "")]):
            table.add_row(outcome.part if number == 0 else "", outcome.state if number == 0 else "", name, value)
    Screen().print(table)


if __name__ == "__main__":
    with visible_streams():
        sys.exit(main())
