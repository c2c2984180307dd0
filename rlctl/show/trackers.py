"""TensorBoard, W&B, Trackio and MLflow behind one seam. Each imports its package when it is opened."""

from __future__ import annotations

import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from specs.load.dotted_keys import flattened
from specs.schema import tracker_tables as tables

Ended = Literal["finished", "failed", "interrupted"]
Values = Mapping[str, float]


@dataclass(frozen=True)
class TrackedAttempt:
    """Say what a tracker is opened with. `config`: every key of the spec; `state`: what it `remembers` of an earlier
    attempt of the same run, {} for a new one."""

    name: str
    run_dir: Path
    config: Mapping[str, Any]
    state: Mapping[str, str] = field(default_factory=dict)

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """Return the spec by dotted keys; keys without a value are left out."""
        return {key: value for key, value in flattened(self.config).items() if value not in (None, "", [], {})}


Columns = dict[str, list[Any]]  # decoded samples of a step; each term of the reward has a column of its own


def sample_columns(step: int, samples: Sequence[Mapping[str, Any]]) -> Columns:
    """Return the columns that any of the samples has, all of the same length."""
    flat = [_flat_sample(step, sample) for sample in samples]
    return {name: [sample.get(name) for sample in flat] for sample in flat for name in sample}


def _flat_sample(step: int, sample: Mapping[str, Any]) -> dict[str, Any]:
    rest = {name: value for name, value in sample.items() if name not in ("terms", "id")}
    plain = {name: value if isinstance(value, str | int | float | None) else str(value) for name, value in rest.items()}
    return {"step": step, **plain, **{f"term_{number}": term for number, term in enumerate(sample.get("terms") or ())}}


class TrackerClient(ABC):
    """Log to one service, as its table of `[[tracking]]` says. `remembers`: how a later attempt finds the same run;
    `address`: where a person does. Opening it raises ImportError, or what its package raises."""

    hint: ClassVar[str]  # where it does not start
    remembers: Mapping[str, str] = {}
    address = ""

    @abstractmethod
    def log(self, step: int, metrics: Values, samples: Columns | None) -> None:
        """Log what a step left. After a resume, a step may come a second time."""

    @abstractmethod
    def close(self, ended: Ended) -> None:
        """Write out what is pending."""


class TensorBoardTracker(TrackerClient):
    """Write event files. A resumed run writes another file to the same folder; of a step that comes twice, the later
    value is shown. Hyperparameters: the tab HParams, and the whole spec as text."""

    hint = "see that the run directory can be written to"

    def __init__(self, table: tables.TensorBoard, attempt: TrackedAttempt) -> None:
        from tensorboardX import SummaryWriter
        from tensorboardX.summary import hparams

        self._writer = SummaryWriter(str(attempt.run_dir / "tensorboard"), write_to_disk=True)
        plain = {
            key: value if isinstance(value, bool | int | float | str) else json.dumps(value)
            for key, value in attempt.hyperparameters.items()
        }
        for summary in hparams(plain, {"reward/mean": 0.0}):  # names the metric that runs are compared by
            self._writer.file_writer.add_summary(summary)
        self._writer.add_text("spec", _code(json.dumps(attempt.config, indent=2, ensure_ascii=False)), 0)

    def log(self, step: int, metrics: Values, samples: Columns | None) -> None:
        for key, value in metrics.items():
            self._writer.add_scalar(key, value, step)
        if samples is not None:
            rows = (dict(zip(samples, row, strict=True)) for row in zip(*samples.values(), strict=True))
            self._writer.add_text("samples", "\n\n---\n\n".join(map(_markdown, rows)), step)
        self._writer.flush()

    def close(self, ended: Ended) -> None:
        self._writer.close()


def _markdown(row: Mapping[str, object]) -> str:
    """Put what a model wrote in code blocks, so that nothing of it is markup."""
    return "\n\n".join(f"**{name}**\n\n{_code(str(value))}" for name, value in row.items() if name != "step")


def _code(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines() or [""])


class WandBTracker(TrackerClient):
    """Make `step` a metric of its own and the x axis of all others: W&B's own step only ever grows, and would drop what
    a resumed run computes again after its checkpoint."""

    hint = "`wandb login`, or WANDB_MODE=offline to log to the run directory"

    def __init__(self, table: tables.WandB, attempt: TrackedAttempt) -> None:
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

    def log(self, step: int, metrics: Values, samples: Columns | None) -> None:
        more = {}
        if samples is not None:
            rows = [list(row) for row in zip(*samples.values(), strict=True)]
            more["samples"] = self._wandb.Table(columns=list(samples), data=rows, allow_mixed_types=True)
        self._run.log({"step": step, **metrics, **more})

    def close(self, ended: Ended) -> None:
        self._run.finish(exit_code=0 if ended == "finished" else 1)


class TrackioTracker(TrackerClient):
    """Find a run again by its name, which Trackio may change where the project has one of that name."""

    hint = "`hf auth login` for a Space; without `space_id` it logs to this machine"

    def __init__(self, table: tables.Trackio, attempt: TrackedAttempt) -> None:
        import trackio

        self._trackio: Any = trackio
        self._run = trackio.init(
            project=table.project,
            name=attempt.state.get("name", attempt.name),
            space_id=table.space_id or None,
            config=dict(attempt.config),
            resume="allow" if attempt.state else "never",
        )
        self.remembers = {"name": self._run.name}

    def log(self, step: int, metrics: Values, samples: Columns | None) -> None:
        more = {}
        if samples is not None:
            import pandas

            more["samples"] = self._trackio.Table(dataframe=pandas.DataFrame(samples))
        self._run.log({**metrics, **more}, step=step)

    def close(self, ended: Ended) -> None:
        self._run.finish()


class MLflowTracker(TrackerClient):
    """Log hyperparameters as parameters, which MLflow never changes: those of the first attempt. `resolved.json` among
    the artifacts is that of the last one. Samples are one table, `samples.json`, that grows."""

    hint = "see that `tracking_uri` or MLFLOW_TRACKING_URI names a server that answers"
    at_once, longest = 100, 500  # parameters in a request, and characters of one, that every server takes
    statuses: ClassVar = {"finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}

    def __init__(self, table: tables.MLflow, attempt: TrackedAttempt) -> None:
        os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
        import mlflow

        self._mlflow: Any = mlflow
        if table.tracking_uri:
            mlflow.set_tracking_uri(table.tracking_uri)
        mlflow.set_experiment(table.experiment)
        if attempt.state:
            run = mlflow.start_run(run_id=attempt.state["run_id"])
        else:
            run = mlflow.start_run(run_name=attempt.name)
            known = [(_mlflow_name(key), self._parameter(value)) for key, value in attempt.hyperparameters.items()]
            for start in range(0, len(known), self.at_once):
                mlflow.log_params(dict(known[start : start + self.at_once]))
        mlflow.log_dict(dict(attempt.config), "resolved.json")
        self.remembers = {"run_id": run.info.run_id}
        self.address = f"run {run.info.run_id} of experiment {table.experiment} at {mlflow.get_tracking_uri()}"

    def _parameter(self, value: Any) -> str:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        return text if len(text) <= self.longest else text[: self.longest - 1] + "…"

    def log(self, step: int, metrics: Values, samples: Columns | None) -> None:
        self._mlflow.log_metrics({_mlflow_name(key): value for key, value in metrics.items()}, step=step)
        if samples is not None:
            self._mlflow.log_table(samples, artifact_file="samples.json")

    def close(self, ended: Ended) -> None:
        self._mlflow.end_run(status=self.statuses[ended])


def _mlflow_name(key: str) -> str:
    """Replace what MLflow does not take: `pass@4` becomes `pass_4`."""
    return re.sub(r"[^\w\-. /]", "_", key, flags=re.ASCII)


TRACKERS: dict[str, Any] = {
    "tensorboard": TensorBoardTracker,
    "wandb": WandBTracker,
    "trackio": TrackioTracker,
    "mlflow": MLflowTracker,
}
