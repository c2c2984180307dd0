"""The first row of each source that a spec names, where this host has it: what a reward function would be given."""

from __future__ import annotations

from pathlib import Path

from specs.errors import DataError
from specs.schema.sections import is_hub_data
from specs.schema.spec import Spec
from workers.data.row_source import DataRow, read_rows


def first_rows(spec: Spec, spec_dir: Path) -> list[DataRow]:
    """The first row of `data.train`, then of each evaluation set. Sources on a hub, which are not read here, and those
    that cannot be read are left out."""
    sources = [spec.data.train, *(one.data for one in spec.evaluations if one.data)]
    rows = []
    for source in sources:
        if is_hub_data(source):
            continue
        try:
            row = next(read_rows(source, split="", base=spec_dir, max_rows=1), None)
        except DataError:
            continue
        if row is not None and not row.problem:
            rows.append(row)
    return rows
