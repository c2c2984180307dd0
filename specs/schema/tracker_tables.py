"""Trackers: a table for each `kind` of `[[tracking]]`. What opens them: `rlctl/show/tracking.py`."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field

from specs.schema.table import NonEmpty, Table, unusable


class Tracker(Table):
    """Keys that all trackers share."""

    package: ClassVar[str]  # what the interpreter of `rlctl train` must be able to import

    kind: str
    samples_every: int = Field(10, ge=0)
    """Steps between tables of decoded samples, those of `samples.jsonl`; 0: none are sent."""

    @property
    def place(self) -> dict[str, str]:
        """Where it logs to: another place is another run there."""
        return {name: str(value) for name, value in self if name not in ("kind", "samples_every")}


class TensorBoard(Tracker):
    """Event files in the run directory, under `tensorboard`."""

    package = "tensorboardX"

    kind: Literal["tensorboard"]


class WandB(Tracker):
    """A run of Weights & Biases. Its own variables (`WANDB_API_KEY`, `WANDB_MODE`, `WANDB_RUN_GROUP`, …) hold."""

    package = "wandb"

    kind: Literal["wandb"]
    project: NonEmpty
    """Project that the run appears in."""
    entity: str = ""
    """User or team that the project is of; empty: the account's default."""


class Trackio(Tracker):
    """A run of Trackio: a database on this machine (`trackio show`), or a Space on the Hugging Face hub."""

    package = "trackio"

    kind: Literal["trackio"]
    project: NonEmpty
    """Project that the run appears in."""
    space_id: str = ""
    """Space to log to, `owner/name`; empty: `TRACKIO_SPACE_ID`, else this machine."""


def _tracking_uri(uri: str) -> str:
    """Return `uri`, if it may be kept in the run directory. Raises PydanticCustomError."""
    if re.search(r"://[^/]*:[^/]*@", uri):
        hint = "take it out and set MLFLOW_TRACKING_USERNAME and _PASSWORD; for a database, set MLFLOW_TRACKING_URI"
        raise unusable("holds a password, which the run directory would keep", hint)
    return uri


class MLflow(Tracker):
    """A run of MLflow. Its own variables (`MLFLOW_TRACKING_URI`, `MLFLOW_TRACKING_TOKEN`, …) hold."""

    package = "mlflow"

    kind: Literal["mlflow"]
    experiment: NonEmpty
    """Experiment that the run appears in; made where it is not there."""
    tracking_uri: Annotated[str, AfterValidator(_tracking_uri)] = ""
    """Server, or a database such as `sqlite:///mlflow.db`; empty: `MLFLOW_TRACKING_URI`, which may hold a password,
    else MLflow's default."""


TrackerTable = Annotated[TensorBoard | WandB | Trackio | MLflow, Field(discriminator="kind")]
