"""The first row of each source that a spec names, where this host has it: what a reward function would be given."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

from specs.errors import DataError
from specs.schema.sections import is_hub_data
from specs.schema.spec import Spec
from workers.data.row_source import DataRow, read_rows

_OTHERS = 20


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


def trial_rows(spec: Spec, spec_dir: Path) -> list[DataRow]:
    """The first row that a reward function is called with, and rows of the same source for the answers of others."""
    for source in [spec.data.train, *(one.data for one in spec.evaluations if one.data)]:
        try:
            if not is_hub_data(source):
                rows = [*islice(read_rows(source, split="", base=spec_dir, max_rows=_OTHERS), _OTHERS)]
                if rows and not rows[0].problem:
                    return [row for row in rows if not row.problem]
        except DataError:
            continue
    return []


def row_columns(spec: Spec, spec_dir: Path) -> tuple[str, ...] | None:
    """Columns that every source has; None where no row could be read."""
    rows = first_rows(spec, spec_dir)
    if not rows:
        return None
    return tuple(name for name in rows[0].values if all(name in row.values for row in rows[1:]))
