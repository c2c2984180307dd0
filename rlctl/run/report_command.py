"""`rlctl report`: the page of a run, or one that compares several."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.text import Text

from rlctl.run.run_dir import is_running
from rlctl.show.report import write_report
from rlctl.show.report_compare import finals, read_runs, render_comparison
from rlctl.show.report_page import write_page
from rlctl.show.screen import Screen
from rlctl.show.text_format import columns
from specs.errors import RlctlError, RunDirError


def report(run_dirs: Sequence[Path], out: Path | None) -> int:
    """Write the page and say where it is. Returns 0. Raises RunDirError where one of them is no run."""
    for run_dir in run_dirs:
        if not (run_dir / "resolved.json").is_file():
            raise RunDirError(f"{run_dir} is no run", hint="name run directories, as `rlctl train` makes them")
    screen = Screen()
    if len(run_dirs) == 1:
        (run_dir,) = run_dirs
        running = is_running(run_dir)
        written = write_report(run_dir, running=running, target=out)
        if written is None:
            page = out or run_dir / "report.html"
            raise RlctlError(f"{page} cannot be written", hint="name another file with --out")
        goes_on = "; the run goes on" + ("" if out else ", and writes it again") if running else ""
        screen.print(f"wrote {written}{goes_on}", soft_wrap=True)
        return 0
    runs = read_runs(run_dirs)
    headings, rows = finals(runs)
    screen.print(Text(columns(headings, rows, left=1)), soft_wrap=True)
    target = out or Path("comparison.html")
    if not write_page(target, render_comparison(runs, target)):
        raise RlctlError(f"{target} cannot be written", hint="name another file with --out")
    screen.print(f"\nwrote {target}", soft_wrap=True)
    return 0
