"""Optional trackers: TensorBoard and Weights & Biases, besides `metrics.jsonl`."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from specs.errors import Problem, RlctlError, SpecError
from specs.schema.spec import Spec


class Tracker(ABC):
    """A context manager that takes each line of `metrics.jsonl`."""

    @abstractmethod
    def log(self, metrics: Mapping[str, Any]) -> None:
        """One step; `metrics["step"]` numbers it. Values that are not finite numbers are left out."""

    def close(self) -> None:
        """Write out what is pending."""

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_tracker(spec: Spec, run_dir: Path) -> Tracker:
    """The tracker that `[tracking]` asks for. Raises SpecError when its package is missing."""
    if spec.tracking is None:
        return NoTracker()
    if spec.tracking.kind == "tensorboard":
        return TensorBoard(run_dir / "tensorboard")
    return WandB(spec, run_dir)


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers among the metrics, without the step."""
    return {
        key: float(value)
        for key, value in metrics.items()
        if key != "step" and isinstance(value, int | float) and math.isfinite(value)
    }


class NoTracker(Tracker):
    """`metrics.jsonl` alone."""

    def log(self, metrics: Mapping[str, Any]) -> None:
        pass


class TensorBoard(Tracker):
    """Event files in `folder`. A resumed run writes another file there; later values win."""

    def __init__(self, folder: Path) -> None:
        self._writer = _load("tensorboardX").SummaryWriter(str(folder), write_to_disk=True)

    def log(self, metrics: Mapping[str, Any]) -> None:
        for key, value in numbers(metrics).items():
            self._writer.add_scalar(key, value, metrics["step"])
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandB(Tracker):
    """A run of Weights & Biases; the resolved spec is its config. Its own settings (WANDB_MODE, …) apply."""

    def __init__(self, spec: Spec, run_dir: Path) -> None:
        assert spec.tracking is not None
        wandb = _load("wandb")
        try:
            self._run = wandb.init(
                project=spec.tracking.project or "rlctl",
                name=spec.run.name,
                dir=str(run_dir),
                config=spec.resolved(),
                settings=wandb.Settings(console="off"),
            )
        except wandb.Error as error:
            raise RlctlError(
                f"wandb did not start: {error}", hint="`wandb login`, or WANDB_MODE=offline to log to the run directory"
            ) from None

    def log(self, metrics: Mapping[str, Any]) -> None:
        self._run.log(numbers(metrics), step=metrics["step"])

    def close(self) -> None:
        self._run.finish()


def _load(package: str) -> ModuleType:
    from importlib import import_module

    try:
        return import_module(package)
    except ImportError:
        kind = "wandb" if package == "wandb" else "tensorboard"
        problem = Problem(
            "tracking.kind", f"the package {package} is not installed", "pip install 'rlctl[tracking]'", kind
        )
        raise SpecError([problem]) from None
