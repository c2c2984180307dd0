"""`rlctl runs`: list the runs in a folder with recipe, state, step, reward and when they last wrote."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.text import Text

from rlctl.run.run_lock import owner_of
from rlctl.show.journal import is_evaluation, last_attempt, newest, read_journal
from rlctl.show.screen import Screen
from rlctl.show.sweep_table import outcome
from rlctl.show.text_format import columns, number, of_steps
from specs.errors import UsageError
from specs.json_file import read_or_empty
from specs.load.dotted_keys import value_at
from specs.terminal import json_text

DEPTHS = ("", "*/", "*/*/")  # a run itself, the runs in a folder, those of the sweeps in it


def runs(folder: Path, *, as_json: bool = False) -> int:
    """Print a line for each run, by name. Returns 0. Raises UsageError where there is none."""
    found = sorted({file.parent for depth in DEPTHS for file in folder.glob(f"{depth}resolved.json") if file.is_file()})
    if not found:
        raise UsageError(f"{folder} holds no runs", hint="name the folder that run.dir names: rlctl runs DIR")
    rows = list[dict[str, Any]]()
    for run in found:
        reached, about, journal = outcome(run), read_or_empty(newest(run, "resolved")), read_journal(run)
        steps, recipe = (value_at(about, f"run.{key}") for key in ("steps", "recipe"))
        if is_evaluation(journal):
            steps, recipe = None, "eval"
        row = {"run": _name(run, folder), "recipe": recipe or "rl", "state": _state(run, journal), "step": reached.step}
        scored = {"reward": reached.score, "metric": reached.scored.word}
        rows.append({**row, "steps": steps, **scored, "when": _last_written(run)})
    if as_json:
        print(json_text(rows))
        return 0
    heads = ("run", "recipe", "state", "step", "reward", "when")
    for row in rows:
        row["step"] = of_steps(row["step"], row["steps"])
        what = "" if row["metric"] == "reward" else f" {row['metric']}"
        row["reward"] = f"{number(row['reward'])}{what}"
    table = columns(heads, [[str(row[head]) for head in heads] for row in rows], left=3)
    Screen(outlives=True).print(Text(table), soft_wrap=True)
    return 0


def _last_written(run: Path) -> str:
    written = [file.stat().st_mtime for name in ("metrics.jsonl", "resolved.json") if (file := run / name).is_file()]
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(max(written)))


def _name(run: Path, folder: Path) -> str:
    return run.absolute().name if run == folder else str(run.relative_to(folder))


def _state(run: Path, journal: Sequence[Mapping[str, Any]]) -> str:
    if owner_of(run):
        return "running"
    last = last_attempt(journal)
    return str(last.get("outcome", "killed")) if last else "–"
