"""MLflow, as a tracker: parameters, metrics, and samples as a table that grows."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from rlctl.show.trackers.tracker import Attempt, Ended, Samples, Tracker, hyperparameters
from specs.schema.tracker_tables import MLflow

_STATUS = {"finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}
_AT_ONCE = 100  # parameters that a server takes in one request
_LONGEST = 500  # characters of a parameter that every server takes


class MLflowTracker(Tracker):
    """Hyperparameters are parameters, which MLflow never changes: those of the first attempt. `resolved.json` among the
    artifacts is that of the last one. Samples are one table, `samples.json`, that grows."""

    hint = "see that `tracking_uri` or MLFLOW_TRACKING_URI names a server that answers"

    def __init__(self, table: MLflow, attempt: Attempt) -> None:
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
            for some in _parameters(attempt.config):
                mlflow.log_params(some)
        mlflow.log_dict(dict(attempt.config), "resolved.json")
        self.remembers = {"run_id": run.info.run_id}
        self.address = f"run {run.info.run_id} of experiment {table.experiment} at {mlflow.get_tracking_uri()}"

    def log(self, step: int, metrics: Mapping[str, float], samples: Samples | None) -> None:
        self._mlflow.log_metrics({_name(key): value for key, value in metrics.items()}, step=step)
        if samples is not None:
            columns = zip(*samples.rows, strict=True)
            data = {name: list(values) for name, values in zip(samples.columns, columns, strict=True)}
            self._mlflow.log_table(data, artifact_file="samples.json")

    def close(self, ended: Ended) -> None:
        self._mlflow.end_run(status=_STATUS[ended])


def _parameters(config: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    known = [(_name(key), _text(value)) for key, value in hyperparameters(config).items()]
    for start in range(0, len(known), _AT_ONCE):
        yield dict(known[start : start + _AT_ONCE])


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def _name(key: str) -> str:
    """As MLflow takes it: `pass@4` becomes `pass_4`."""
    return re.sub(r"[^\w\-. /]", "_", key, flags=re.ASCII)
