"""`trainer.json`: the progress of a trainer. Shared by all train engines."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from specs.errors import CheckpointError

FORMAT = 1
FILE = "trainer.json"


@dataclass
class TrainerState:
    """Optimizer steps made (the schedule's clock) and steps skipped for a gradient that was not finite."""

    optimizer_steps: int = 0
    skipped_steps: int = 0

    def write(self, folder: Path) -> Path:
        text = json.dumps({"format": FORMAT, **asdict(self)}, indent=2) + "\n"
        (folder / FILE).write_text(text, encoding="utf-8")
        return folder / FILE

    @classmethod
    def read(cls, folder: Path) -> TrainerState:
        """Raises CheckpointError when the file is missing, torn or of another version."""
        path = folder / FILE
        try:
            state = json.loads(path.read_text(encoding="utf-8"))
            if state["format"] != FORMAT:
                raise CheckpointError(f"{path} has format {state['format']}, this version reads {FORMAT}")
            return cls(int(state["optimizer_steps"]), int(state["skipped_steps"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path}: {error!r}") from None
