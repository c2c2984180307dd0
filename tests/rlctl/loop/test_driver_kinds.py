"""Every kind of algorithm makes a step of a run, by its name alone."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from local_run import local_run
from running import preset

from specs.load.keys import kind_of, tables_of
from specs.schema.algorithms.algorithm_tables import AlgorithmTable

KINDS = [kind_of(table) for table in tables_of(AlgorithmTable)]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_makes_a_step_by_its_name_alone(tmp_path: Path, kind: str) -> None:
    with local_run(preset("fake", tmp_path), tmp_path / "run", f"algorithm.kind={kind}", "run.steps=1") as run:
        (record,) = run.steps(1)
    assert record.metrics["actor/grad_norm"] > 0
    assert math.isfinite(record.metrics["actor/loss"])
