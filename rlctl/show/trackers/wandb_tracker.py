"""Weights & Biases, as a tracker: a run that a resume goes on with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlctl.show.trackers.tracker import Attempt, Ended, Samples, Tracker
from specs.schema.tracker_tables import WandB


class WandBTracker(Tracker):
    """`step` is a metric of its own and the x axis of all others. W&B's own step only ever grows and would drop what a
    resumed run computes again after its checkpoint."""

    hint = "`wandb login`, or WANDB_MODE=offline to log to the run directory"

    def __init__(self, table: WandB, attempt: Attempt) -> None:
        import wandb

        self._wandb: Any = wandb
        self._run = wandb.init(
            project=table.project,
            entity=table.entity or None,
            name=attempt.name,
            id=attempt.state.get("id"),
            resume="allow" if attempt.state else None,
            dir=str(attempt.run_dir),
            config=dict(attempt.config),
            settings=wandb.Settings(console="off", quiet=True),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self.remembers = {"id": self._run.id}
        self.address = "" if self._run.offline else self._run.url

    def log(self, step: int, metrics: Mapping[str, float], samples: Samples | None) -> None:
        table = {}
        if samples is not None:
            rows = [list(row) for row in samples.rows]
            table["samples"] = self._wandb.Table(columns=list(samples.columns), data=rows, allow_mixed_types=True)
        self._run.log({"step": step, **metrics, **table})

    def close(self, ended: Ended) -> None:
        self._run.finish(exit_code=0 if ended == "finished" else 1)
