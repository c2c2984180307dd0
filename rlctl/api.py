"""Offer rlctl to Python and notebooks (docs/watching.md): the commands as functions, and what runs leave behind."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from rlctl.check.findings import Findings, examine
from rlctl.run import evaluate as evaluation
from rlctl.run import export as exporting
from rlctl.run import report_command
from rlctl.run.train import train as run
from rlctl.show import eval_keys
from rlctl.show.metrics_file import read_metrics, read_samples
from specs.errors import RunDirError, UsageError
from specs.load.overrides import assignments


@dataclass(frozen=True)
class EvalResult:
    """Hold what an evaluation found: `sets` has the metrics of each set by name; `folder` every completion."""

    folder: Path
    step: int
    sets: dict[str, dict[str, float]]


def train(
    spec: str | PathLike[str],
    *,
    run_dir: str | PathLike[str] | None = None,
    resume: bool = False,
    fork_of: str = "",
    accept_changed_files: bool = False,
    **overrides: Any,
) -> Path:
    """Run a spec to its end, as `rlctl train` does, and return the run directory.

    `overrides` are `--set`s: `run__steps=10` is `run.steps = 10`, and a dict may stand for a table. `fork_of`:
    RUN_DIR[@STEP] to begin with. `accept_changed_files`: resume although files that the run reads have changed. Raises
    `specs.errors.RlctlError`, whose `message` and `hint` say what to do. Ctrl-C (a notebook's stop button) saves the
    last finished step and raises `specs.errors.Interrupted`.
    """
    folder = Path(run_dir) if run_dir is not None else None
    return run(Path(spec), assignments(overrides), folder, resume, accept_changed_files, fork_of=fork_of)


def check_config(spec: str | PathLike[str], **overrides: Any) -> Findings:
    """Check a spec as `rlctl check-config` does: `problems` and `warnings`, each with `key`,
    `message` and `hint`; `ok` where there is no problem. Starts nothing, changes nothing."""
    return examine(Path(spec), assignments(overrides))


def evaluate(
    what: str | PathLike[str],
    spec: str | PathLike[str] | None = None,
    *,
    step: int | None = None,
    out: str | PathLike[str] | None = None,
    **overrides: Any,
) -> EvalResult:
    """Evaluate a run's checkpoint, or a model on the sets of a `spec`, as `rlctl eval` does. `step`: the newest unless
    given; `out`: the folder to write. Raises `specs.errors.RlctlError`."""
    paths = [Path(path) if path is not None else None for path in (spec, out)]
    folder = evaluation.evaluate(str(what), paths[0], assignments(overrides), step=step, out=paths[1])
    (metrics,) = load_metrics(folder)
    return EvalResult(folder, metrics["step"], {name: dict(one) for name, one in eval_keys.by_set(metrics).items()})


def export(run: str | PathLike[str], out: str | PathLike[str], *, step: int | None = None, **options: Any) -> Path:
    """Turn a checkpoint into a Hugging Face folder, proven to load, as `rlctl export-checkpoint` does; return the
    folder. `options`: `role`, `dtype`, `adapter_only`, `push_to_hub`, `public`, `shard_GB`, `memory_GiB`. Raises
    `specs.errors.RlctlError`."""
    exporting.export(Path(run), Path(out), step, **options)
    return Path(out)


def report(*runs: str | PathLike[str], out: str | PathLike[str] | None = None) -> Path:
    """Write the page of a run, also while it runs, or of several one that compares them; return where it is.
    Raises `specs.errors.RlctlError`."""
    if not runs:
        raise UsageError("no run is named", hint="name directories of runs, as `rlctl.train` returns them")
    return report_command.report([Path(one) for one in runs], Path(out) if out is not None else None)


def load_samples(run: str | PathLike[str]) -> list[dict[str, Any]]:
    """Return the lines of a run's `samples.jsonl`: a few completions of each step, with their rewards. Raises
    `specs.errors.RunDirError`."""
    return read_samples(_file_of(run, "samples.jsonl"))


def load_metrics(run: str | PathLike[str]) -> list[dict[str, Any]]:
    """Return the lines of a run's `metrics.jsonl`, a dict per step, also while it runs: `pandas.DataFrame` takes them.
    A metric that a step does not have is not in its dict. Raises `specs.errors.RunDirError`."""
    return read_metrics(_file_of(run, "metrics.jsonl"))


def _file_of(run: str | PathLike[str], name: str) -> Path:
    file = Path(run) / name
    if not file.exists():
        raise RunDirError(f"{run} holds no {name}", hint="name the directory of a run")
    return file
