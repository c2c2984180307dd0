"""Stand-in for trackio 0.43.0. Several runs may share a name; the newest is resumed."""

from __future__ import annotations

import itertools
from typing import Any

from tracker_packages.told import tell

_ids = itertools.count()
_newest: dict[str, str] = {}  # name → id


class Table:
    def __init__(self, columns=None, data=None, dataframe=None, rows=None, optional=True, allow_mixed_types=False,
                 log_mode="IMMUTABLE"):  # fmt: skip
        self.columns, self.data = list(dataframe.columns), dataframe.to_numpy().tolist()


class Run:
    def __init__(self, name: str, id: str) -> None:
        self.name, self.id = name, id

    def log(self, metrics: dict[str, Any], step: int | None = None) -> None:
        tell("trackio.log", metrics=metrics, step=step, run=self.id)


def init(project, name=None, group=None, space_id=None, server_url=None, dataset_id=None, bucket_id=None, config=None,
         resume="never", settings=None, private=None, embed=True, auto_log_gpu=None, gpu_log_interval=10.0,
         auto_log_cpu=None, cpu_log_interval=10.0, webhook_url=None, webhook_min_level=None) -> Run:  # fmt: skip
    assert resume in ("never", "allow", "must")
    tell("trackio.init", project=project, name=name, space_id=space_id, resume=resume, config=config)
    resumed = resume != "never" and name in _newest
    _newest[name] = _newest[name] if resumed else str(next(_ids))
    return Run(name, _newest[name])


def finish() -> None:
    tell("trackio.finish")
