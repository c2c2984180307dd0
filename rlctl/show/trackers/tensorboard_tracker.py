"""TensorBoard: event files that `tensorboard --logdir RUN_DIR` shows."""

from __future__ import annotations

import json
from collections.abc import Mapping

from rlctl.show.trackers.tracker import Attempt, Ended, Samples, Tracker, hyperparameters
from specs.schema.tracker_tables import TensorBoard


class TensorBoardTracker(Tracker):
    """A resumed run writes another file to the same folder; of a step that comes twice, the later value is shown.
    Hyperparameters: the tab HParams, and the whole spec as text."""

    hint = "see that the run directory can be written to"

    def __init__(self, table: TensorBoard, attempt: Attempt) -> None:
        from tensorboardX import SummaryWriter
        from tensorboardX.summary import hparams

        self._writer = SummaryWriter(str(attempt.run_dir / "tensorboard"), write_to_disk=True)
        known = {
            key: value if isinstance(value, bool | int | float | str) else json.dumps(value)
            for key, value in hyperparameters(attempt.config).items()
        }
        for summary in hparams(known, {"reward/mean": 0.0}):  # names the metric that runs are compared by
            self._writer.file_writer.add_summary(summary)
        self._writer.add_text("spec", _code(json.dumps(attempt.config, indent=2, ensure_ascii=False)), 0)

    def log(self, step: int, metrics: Mapping[str, float], samples: Samples | None) -> None:
        for key, value in metrics.items():
            self._writer.add_scalar(key, value, step)
        if samples is not None:
            rows = (dict(zip(samples.columns, row, strict=True)) for row in samples.rows)
            self._writer.add_text("samples", "\n\n---\n\n".join(map(_sample, rows)), step)
        self._writer.flush()

    def close(self, ended: Ended) -> None:
        self._writer.close()


def _sample(row: Mapping[str, object]) -> str:
    """Markdown; what a model wrote stands in code blocks, so that nothing of it is markup."""
    return "\n\n".join(f"**{name}**\n\n{_code(str(value))}" for name, value in row.items() if name != "step")


def _code(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines() or [""])
