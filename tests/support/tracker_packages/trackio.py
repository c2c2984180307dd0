"""Stand-in for trackio 0.43.0. A run that is not resumed gets a name of its own where one has it."""

from __future__ import annotations

from typing import Any

from tracker_packages.told import tell

_names: set[str] = set()


class Table:
    def __init__(self, columns=None, data=None, dataframe=None, rows=None, optional=True, allow_mixed_types=False,
                 log_mode="IMMUTABLE"):  # fmt: skip
        self.columns, self.data = list(dataframe.columns), dataframe.to_numpy().tolist()


class Run:
    def __init__(self, name: str) -> None:
        self.name = name

    def log(self, metrics: dict[str, Any], step: int | None = None) -> None:
        tell("trackio.log", metrics=metrics, step=step)

    def finish(self) -> None:
        tell("trackio.finish")


def init(project, name=None, group=None, space_id=None, server_url=None, dataset_id=None, bucket_id=None, config=None,
         resume="never", settings=None, private=None, embed=True, auto_log_gpu=None, gpu_log_interval=10.0,
         auto_log_cpu=None, cpu_log_interval=10.0, webhook_url=None, webhook_min_level=None) -> Run:  # fmt: skip
    assert resume in ("never", "allow", "must")
    tell("trackio.init", project=project, name=name, space_id=space_id, resume=resume, config=config)
    own = f"{name}-2" if resume == "never" and name in _names else name
    _names.add(own)
    return Run(own)
