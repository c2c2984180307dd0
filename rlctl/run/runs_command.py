"""`rlctl runs`: list the runs in a folder with their state, step and reward."""

from __future__ import annotations

from pathlib import Path

from rich.text import Text

from rlctl.run.run_lock import owner_of
from rlctl.show.journal import last_attempt, newest, read_journal
from rlctl.show.screen import Screen
from rlctl.show.sweep_table import outcome
from rlctl.show.text_format import columns, number
from specs.errors import UsageError
from specs.json_file import read_object
from specs.load.dotted_keys import value_at

DEPTHS = ("", "*/", "*/*/")  # a run itself, the runs in a folder, those of the sweeps in it


def runs(folder: Path) -> int:
    """Print a line for each run, by name. Returns 0. Raises UsageError where there is none."""
    found = sorted({file.parent for depth in DEPTHS for file in folder.glob(f"{depth}resolved.json")})
    if not found:
        raise UsageError(f"{folder} holds no runs", hint="name the folder that run.dir names: rlctl runs DIR")
    rows = []
    for run in found:
        reached = outcome(run)
        rows.append((_name(run, folder), _state(run), f"{reached.step}/{_planned(run)}", number(reached.score)))
    Screen(outlives=True).print(Text(columns(("run", "state", "step", "reward"), rows, left=2)), soft_wrap=True)
    return 0


def _name(run: Path, folder: Path) -> str:
    return run.absolute().name if run == folder else str(run.relative_to(folder))


def _state(run: Path) -> str:
    if owner_of(run):
        return "running"
    last = last_attempt(read_journal(run))
    return str(last.get("outcome", "killed")) if last else "–"


def _planned(run: Path) -> object:
    try:
        return value_at(read_object(newest(run, "resolved")), "run.steps", "–")
    except ValueError:
        return "–"
