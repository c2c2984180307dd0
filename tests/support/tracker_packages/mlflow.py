"""Stand-in for mlflow 3.17.2. Refuses what a server refuses: names with other characters, long or many parameters."""

from __future__ import annotations

import itertools
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tracker_packages.told import tell

_made = itertools.count(1)
_NAME = re.compile(r"[A-Za-z0-9_\-. :/]+")


class MlflowException(Exception):
    pass


_used = ["http://server"]


def get_tracking_uri() -> str:
    return _used[-1]


def set_tracking_uri(uri: str) -> None:
    _used.append(uri)
    tell("mlflow.set_tracking_uri", uri=uri)


def set_experiment(experiment_name=None, experiment_id=None, trace_location=None) -> None:
    tell("mlflow.set_experiment", name=experiment_name)
    if (database := Path(_used[-1].removeprefix("sqlite:///"))) != Path(_used[-1]) and not database.exists():
        time.sleep(0.5)
        database.open("x").close()  # as it makes tables that it found missing: they must not be there by now


def start_run(run_id=None, experiment_id=None, run_name=None, nested=False, parent_run_id=None, tags=None,
              description=None, log_system_metrics=None) -> Any:  # fmt: skip
    tell("mlflow.start_run", run_id=run_id, run_name=run_name)
    return SimpleNamespace(info=SimpleNamespace(run_id=run_id or f"run{next(_made)}"))


def log_params(params: dict[str, Any], synchronous=None, run_id=None) -> None:
    if len(params) > 100 or any(len(str(value)) > 500 for value in params.values()) or not _named(params):
        raise MlflowException("INVALID_PARAMETER_VALUE")
    tell("mlflow.log_params", params=params)


def log_metrics(metrics: dict[str, float], step=None, synchronous=None, run_id=None, timestamp=None, model_id=None,
                dataset=None) -> None:  # fmt: skip
    assert run_id, "in a thread that started none, MLflow would begin another run"
    if not _named(metrics):
        raise MlflowException("INVALID_PARAMETER_VALUE")
    tell("mlflow.log_metrics", metrics=metrics, step=step)


def log_dict(dictionary: dict[str, Any], artifact_file: str, run_id=None) -> None:
    tell("mlflow.log_dict", artifact_file=artifact_file, dictionary=dictionary)


def log_table(data: dict[str, Any], artifact_file: str, run_id=None) -> None:
    assert run_id, "in a thread that started none, MLflow would begin another run"
    tell("mlflow.log_table", artifact_file=artifact_file, data=data)


def end_run(status: str = "FINISHED") -> None:
    assert status in ("FINISHED", "FAILED", "KILLED")
    tell("mlflow.end_run", status=status)


def _named(values: dict[str, Any]) -> bool:
    return all(_NAME.fullmatch(name) for name in values)
