"""The progress of a trainer (`trainer.json`), and the learning rate that follows from it."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

from specs.errors import CheckpointError
from specs.schema.role_section import Optimizer

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


def lr_at(step: int, optimizer: Optimizer, total_steps: int) -> float:
    """Learning rate of optimizer step `step` (the first is 0) of `total_steps`.

    The warm-up climbs linearly and reaches `lr` in its last step. From the step after it, linear and cosine fall from
    `lr` towards `lr * min_lr_ratio`, which they would reach in step `total_steps`; past the end it stays there.
    A step that is skipped for a non-finite gradient is not counted: the next one has the same learning rate.
    """
    if step < optimizer.warmup_steps:
        return optimizer.lr * (step + 1) / optimizer.warmup_steps
    if optimizer.schedule == "constant":
        return optimizer.lr
    decay_steps = max(1, total_steps - optimizer.warmup_steps)
    progress = min(1.0, (step - optimizer.warmup_steps) / decay_steps)
    share = 1.0 - progress if optimizer.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return optimizer.lr * (optimizer.min_lr_ratio + (1.0 - optimizer.min_lr_ratio) * share)
