"""The first row that a reward function would be called with, where this host has it."""

from __future__ import annotations

from pathlib import Path

from specs.errors import DataError
from specs.schema.sections import is_hub_data
from specs.schema.spec import Spec
from workers.data.row_source import DataRow, read_rows


def first_row(spec: Spec, spec_dir: Path) -> DataRow | None:
    """Return the first row of `data.train`, or of the first evaluation set that can be read. Nothing is downloaded."""
    for source in [spec.data.train, *(one.data for one in spec.evaluations if one.data)]:
        if is_hub_data(source):
            continue
        try:
            row = next(read_rows(source, split="", base=spec_dir, max_rows=1), None)
        except DataError:
            continue
        if row is not None and not row.problem:
            return row
    return None
