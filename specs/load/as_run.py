"""The text of a spec with `--set` in it, as a run directory keeps it."""

from __future__ import annotations

from collections.abc import Sequence

import tomli

from specs.load.overrides import apply_overrides
from specs.load.toml_file import dumped


def as_run(text: str, overrides: Sequence[str]) -> str:
    """Return the TOML text of the spec that `text` and valid `overrides` make together: `text` where they change
    nothing, else its tables without comments, below the overrides."""
    before, wanted = tomli.loads(text), tomli.loads(text)
    apply_overrides(before, ())
    apply_overrides(wanted, overrides)
    if wanted == before:
        return text
    listed = "".join(f"# --set {line}\n" for override in overrides for line in override.splitlines())
    return f"{listed}\n{dumped(wanted)}"
