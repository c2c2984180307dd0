"""Offer rlctl to Python and notebooks (docs/watching.md): `train`, `check_config` and `load_metrics`."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

from rlctl.check.findings import Findings, examine
from rlctl.run.train import train as run
from rlctl.show.metrics_file import read_metrics
from specs.errors import RunDirError
from specs.load.overrides import assignments


def train(
    spec: str | PathLike[str],
    *,
    run_dir: str | PathLike[str] | None = None,
    resume: bool = False,
    fork_of: str = "",
    **overrides: Any,
) -> Path:
    """Run a spec to its end, as `rlctl train` does, and return the run directory.

    `overrides` are `--set`s: `run__steps=10` is `run.steps = 10`, and a dict may stand for a table. `fork_of`:
    RUN_DIR[@STEP] to begin with. Raises `specs.errors.RlctlError`, whose `message` and `hint` say what to do. Ctrl-C (a
    notebook's stop button) saves the last finished step and raises `specs.errors.Interrupted`.
    """
    folder = Path(run_dir) if run_dir is not None else None
    return run(Path(spec), assignments(overrides), folder, resume, fork_of=fork_of)


def check_config(spec: str | PathLike[str], **overrides: Any) -> Findings:
    """Check a spec as `rlctl check-config` does: `problems` and `warnings`, each with `key`,
    `message` and `hint`; `ok` where there is no problem. Starts nothing, changes nothing."""
    return examine(Path(spec), assignments(overrides))


def load_metrics(run: str | PathLike[str]) -> list[dict[str, Any]]:
    """Return the lines of a run's `metrics.jsonl`, a dict per step, also while it runs: `pandas.DataFrame` takes them.
    A metric that a step does not have is not in its dict. Raises `specs.errors.RunDirError`."""
    file = Path(run) / "metrics.jsonl"
    if not file.exists():
        raise RunDirError(f"{run} holds no metrics.jsonl", hint="name the directory of a run")
    return read_metrics(file)
