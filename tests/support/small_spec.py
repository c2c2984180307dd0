"""Hold the small sound spec that many tests and the corpus start from: `tests/specs/corpus/base.toml`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tomli

from specs.errors import Problem, SpecError
from specs.load.load import spec_from

FILE = Path(__file__).parent.parent / "specs" / "corpus" / "base.toml"


def raw_spec(**sections: dict[str, Any]) -> dict[str, Any]:
    """Return its tables; the keys of `sections` are set over its own."""
    raw = tomli.loads(FILE.read_text())
    return raw | {name: {**raw.get(name, {}), **keys} for name, keys in sections.items()}


def problems_of(raw: dict[str, Any]) -> list[Problem]:
    """Return the problems that loading these tables finds."""
    try:
        spec_from(raw)
    except SpecError as error:
        return error.problems
    return []


def only_problem(raw: dict[str, Any]) -> Problem:
    """Return the only problem that loading these tables finds; it has a hint."""
    with pytest.raises(SpecError) as caught:
        spec_from(raw)
    (found,) = caught.value.problems
    assert found.hint
    return found
