"""Stand-in for wandb 0.31.0. `id` decides which run it is; without one each `init` makes a new run."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

from tracker_packages.told import tell

_made = itertools.count(1)


class Error(Exception):
    pass


def Settings(console: str = "auto", quiet: bool = False) -> SimpleNamespace:
    return SimpleNamespace(console=console, quiet=quiet)


class Table:
    def __init__(self, columns=None, data=None, rows=None, dataframe=None, dtype=None, optional=True,
                 allow_mixed_types=False, log_mode="IMMUTABLE"):  # fmt: skip
        assert allow_mixed_types, "the answer of one row may be a number and that of another text"
        self.columns, self.data = columns, data


class Run:
    def __init__(self, id: str) -> None:
        self.id, self.offline, self.url = id, False, f"https://wandb.ai/run/{id}"

    def define_metric(self, name, step_metric=None, step_sync=None, hidden=None, summary=None, overwrite=None) -> None:
        tell("wandb.define_metric", name=name, step_metric=step_metric)

    def log(self, data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        tell("wandb.log", data=data, step=step)

    def finish(self, exit_code: int | None = None) -> None:
        tell("wandb.finish", exit_code=exit_code)


def init(entity=None, project=None, dir=None, id=None, name=None, notes=None, tags=None, config=None,
         config_exclude_keys=None, config_include_keys=None, allow_val_change=None, group=None, job_type=None,
         mode=None, force=None, reinit=None, resume=None, resume_from=None, fork_from=None, save_code=None,
         tensorboard=None, sync_tensorboard=None, monitor_gym=None, settings=None, anonymous=None) -> Run:  # fmt: skip
    assert resume in (None, "allow", "never", "must", "auto")
    tell("wandb.init", entity=entity, project=project, id=id, name=name, resume=resume, config=config)
    return Run(id or f"run{next(_made)}")
