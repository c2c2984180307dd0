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
    """Count the optimizer's steps, and those skipped for a gradient that was not finite. `schedule_offset`: how far the
    clock of the learning rate is ahead of the optimizer's, whose steps a fork brings from another run."""

    optimizer_steps: int = 0
    skipped_steps: int = 0
    schedule_offset: int = 0

    @property
    def schedule_steps(self) -> int:
        return self.optimizer_steps + self.schedule_offset

    def start_schedule_at(self, steps: int) -> None:
        self.schedule_offset = steps - self.optimizer_steps

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
            steps, skipped, offset = state["optimizer_steps"], state["skipped_steps"], state.get("schedule_offset", 0)
            return cls(int(steps), int(skipped), int(offset))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path}: {error!r}") from None
