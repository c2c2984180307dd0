"""Name the weights of a role after a step of a run: as a model, they lie in RUN/exports/ROLE_step_NNNNNN.

The start of a run makes that folder where it is missing (`rlctl/run/run_exports.py`).
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specs.json_file import read_or_empty
from specs.load.dotted_keys import value_at
from specs.schema.roles import ACTOR, RoleName

FOLDER = "exports"
NOTE = "rlctl_export.json"  # in every export: what it is of


@dataclass(frozen=True)
class RunExport:
    """Name them; nothing of it need be there."""

    run: Path
    role: RoleName
    step: int

    @staticmethod
    def of(path: Path | str) -> RunExport | None:
        """Return what a model's path names; None: not a run's export."""
        found = re.fullmatch(rf"(.+)/{FOLDER}/([a-z_]+)_step_(\d{{6,}})/?", str(path))
        return RunExport(Path(found[1]), found[2], int(found[3])) if found else None

    def __str__(self) -> str:
        return f"{self.run}, step {self.step}" + (f" ({self.role})" if self.role != ACTOR else "")

    @property
    def folder(self) -> Path:
        return self.run / FOLDER / f"{self.role}_step_{self.step:06d}"

    @property
    def way_out(self) -> str:
        """Return the hint for a run that cannot be written to."""
        command = f"rlctl export-checkpoint {shlex.quote(str(self.run))} OUT --step {self.step} --role {self.role}"
        return f"`{command}` exports elsewhere: name OUT as the model then"

    @property
    def manifest(self) -> dict[str, Any]:
        """Return what the checkpoint says; empty where it is not there."""
        return read_or_empty(self.run / "checkpoints" / f"step_{self.step:06d}" / "manifest.json")

    @property
    def base(self) -> str:
        """Return the model that the run began with, folder or hub id: its config and tokenizer are the same. "" where
        unknown."""
        return str(value_at(self.manifest, ("roles", self.role, "model_path")) or "")
