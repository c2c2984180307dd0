"""Trackio, as a tracker: a local dashboard, or a Space on the hub."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlctl.show.trackers.tracker import Attempt, Ended, Samples, Tracker
from specs.schema.tracker_tables import Trackio


class TrackioTracker(Tracker):
    """A run is found again by its name, which Trackio may change where the project has one of that name."""

    hint = "`hf auth login` for a Space; without `space_id` it logs to this machine"

    def __init__(self, table: Trackio, attempt: Attempt) -> None:
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

    def log(self, step: int, metrics: Mapping[str, float], samples: Samples | None) -> None:
        table = {}
        if samples is not None:
            import pandas

            frame = pandas.DataFrame([list(row) for row in samples.rows], columns=list(samples.columns))
            table["samples"] = self._trackio.Table(dataframe=frame)
        self._run.log({**metrics, **table}, step=step)

    def close(self, ended: Ended) -> None:
        self._run.finish()
