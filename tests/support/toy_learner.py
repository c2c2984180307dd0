"""A role that learns, as another package would write it: the section, the row in the table of roles and the worker.

It holds a model of its own beside the actor's, with an optimizer, and saves what it has learned. Registered by
`tests/specs/schema/test_roles_learner.py`; none of our files knows it.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from backends.protocol import Rank
from specs.schema.engines.engine_registry import TrainEngineTable
from specs.schema.engines.fake_tables import FakeTrainTable
from specs.schema.recipes import RlSpec
from specs.schema.role_section import ModelRole, Optimizer
from specs.schema.roles import Role
from specs.wire import bodies
from workers.roles import handlers_of
from workers.roles.trainer import Trainer
from workers.saved_files import settle
from workers.serve import Emit, Handlers, Reply, Request

ROW = Role(
    "coach",
    "learner",
    "the coach",
    wave=2,
    needed_if="needs_coach",
    worker="toy_learner:handlers",
)


class CoachSection(ModelRole):
    """The model that predicts the score."""

    engine: TrainEngineTable = Field(FakeTrainTable(), description="How the coach is held.")
    optimizer: Optimizer = Field(Optimizer(), description="Optimizer and schedule.")


class SpecWithCoach(RlSpec):
    coach: CoachSection | None = None

    @property
    def needs_coach(self) -> bool:
        return self.coach is not None


class Coach(Trainer):
    """A rank of the coach."""

    def save(self, call: Request[bodies.Save], emit: Emit) -> Reply:
        folder = Path(call.body.folder)
        return {"files": settle(folder, [*self.engine.save(folder)])}, {}

    def load(self, call: Request[bodies.Load], emit: Emit) -> Reply:
        self.engine.load(Path(call.body.folder))
        print(f"loaded {call.body.folder}")
        return {}, {}


def handlers(rank: Rank) -> Handlers:
    return handlers_of(Coach(rank))
