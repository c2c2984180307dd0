"""Samples that wait for their step, in a checkpoint's driver folder.

driver/state.json                  cursor, and for each batch its step, its cursors and what judging said
driver/ahead_000007.safetensors    columns of the batch of step 7, with its scores
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from rlctl.run_ahead import Planned
from rlctl.sampling import Drawn, Scored
from specs.batch import Batch
from specs.errors import CheckpointError


def write(folder: Path, line: Iterable[Planned]) -> list[dict[str, Any]]:
    """Write every batch's columns; returns what `state.json` says of them."""
    from safetensors.numpy import save_file

    said = []
    for planned in line:
        assert planned.drawn is not None, "only what is drawn can be kept"
        batch, scored = planned.drawn.batch, planned.drawn.scored
        columns = {**batch.columns, "reward_B": scored.reward_B, "scored_B": scored.scored_B}
        save_file({name: np.ascontiguousarray(column) for name, column in columns.items()}, _file(folder, planned))
        words = {key: value for key, value in asdict(scored).items() if key in ("failures", "terms", "samples")}
        said.append({"step": planned.number, "start": planned.start, "end": planned.end, **words})
    return said


def read(folder: Path, said: Iterable[Mapping[str, Any]]) -> list[Planned]:
    """What `write` wrote. Raises CheckpointError."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    line = []
    for entry in said:
        planned = Planned(int(entry["step"]), int(entry["start"]), int(entry["end"]))
        path = _file(folder, planned)
        try:
            columns = load_file(path)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path}: {error}") from None
        scores = columns.pop("reward_B"), columns.pop("scored_B").astype(bool)
        scored = Scored(*scores, dict(entry["failures"]), dict(entry["terms"]), list(entry["samples"]))
        planned.drawn = Drawn(Batch(columns), scored)
        line.append(planned)
    return line


def _file(folder: Path, planned: Planned) -> Path:
    return folder / f"ahead_{planned.number:06d}.safetensors"
