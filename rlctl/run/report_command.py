"""`rlctl report`: write the page of a run, also while it runs, or one that compares several."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rich.text import Text

from rlctl.run.run_dir import FULL
from rlctl.run.run_lock import owner_of
from rlctl.show.report import render
from rlctl.show.report_compare import differences, finals, read_runs, render_comparison
from rlctl.show.report_page import replaceable, write_page
from rlctl.show.screen import progress_screen
from rlctl.show.text_format import columns
from specs.errors import RlctlError, RunDirError, UsageError
from specs.packages import with_our_packages
from specs.terminal import json_text

REPORT_S = 30.0  # between two writings of the report of a run


class RunningReport:
    """Write a run's page now and then, so that an open one follows it.

    A process of its own does it: reading the steps so far takes 12 kB of memory for each, which the driver would keep.
    """

    def __init__(self, run_dir: Path) -> None:
        self._command = [sys.executable, "-P", "-m", "rlctl", "report", str(run_dir)]
        self._process: subprocess.Popen[bytes] | None = None
        self._due = time.monotonic() + REPORT_S

    def follow(self, step: int) -> None:
        """Write the page if it is due. Later steps take longer, 0.2 ms each: about a hundredth of a core's time."""
        now = time.monotonic()
        if now < self._due or (self._process is not None and self._process.poll() is None):
            return
        self._due, none = now + max(REPORT_S, 0.02 * step), subprocess.DEVNULL
        with suppress(OSError):
            env = with_our_packages()
            self._process = subprocess.Popen(self._command, stdin=none, stdout=none, stderr=none, env=env)

    def close(self) -> None:
        """Wait for a page being written, which would replace the one of the end."""
        if self._process is not None:
            self._process.wait()


def report(run_dirs: Sequence[Path], out: Path | None, *, as_json: bool = False) -> Path:
    """Write the page, say where it is, and return that. Raises UsageError, also where a file stands there that is no
    such page, or RunDirError where one is no run."""
    for run_dir in run_dirs:
        if not (run_dir / "resolved.json").is_file():
            raise RunDirError(f"{run_dir} is not a run directory", hint="name folders that `rlctl runs DIR` lists")
    target = out or (run_dirs[0] / "report.html" if len(run_dirs) == 1 else Path("comparison.html"))
    if target.is_file() and not replaceable(target):
        hint = "name another file with --out, or move this one away"
        raise UsageError(f"{target} exists, and is not a page that rlctl wrote", hint=hint)
    screen, goes_on, tables = progress_screen(as_json=as_json), "", []
    if len(run_dirs) == 1:
        (run_dir,) = run_dirs
        running = bool(owner_of(run_dir))
        refused = write_page(target, render(run_dir, running=running, target=target))
        goes_on = "; the run is not over" + ("" if out else ", and writes it again") if running else ""
    else:
        runs = read_runs(run_dirs)
        for headings, rows in (finals(runs), differences(runs)):
            if rows:
                tables.append([dict(zip(headings, row, strict=True)) for row in rows])
                screen.print(Text(columns(headings, rows, left=1) + "\n"), soft_wrap=True)
        refused = write_page(target, render_comparison(runs, target))
    if refused:
        kind = RlctlError if refused.errno in FULL else UsageError
        raise kind(f"{target} cannot be written: {refused.strerror}", hint="name another file with --out")
    screen.print(f"wrote {target}{goes_on}", soft_wrap=True)
    if as_json:
        print(json_text({"page": str(target), "tables": tables}))
    return target
