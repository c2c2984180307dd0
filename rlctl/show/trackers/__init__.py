"""One file per tracker; each imports its package when it is opened."""

from __future__ import annotations

from rlctl.show.trackers.mlflow_tracker import MLflowTracker
from rlctl.show.trackers.tensorboard_tracker import TensorBoardTracker
from rlctl.show.trackers.tracker import Tracker
from rlctl.show.trackers.trackio_tracker import TrackioTracker
from rlctl.show.trackers.wandb_tracker import WandBTracker

TRACKERS: dict[str, type[Tracker]] = {
    "tensorboard": TensorBoardTracker,
    "wandb": WandBTracker,
    "trackio": TrackioTracker,
    "mlflow": MLflowTracker,
}
