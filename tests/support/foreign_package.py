"""A distribution made on the spot: what `pip install` leaves of a package that brings engines."""

from __future__ import annotations

from pathlib import Path

TABLE = '''
"""The spec tables of train engines that another package brings."""

from typing import ClassVar, Literal

from pydantic import Field

from specs.memory_parts import Part
from specs.schema.engines.engine_table import TrainTable
from specs.schema.engines.fake_tables import FakeTrainTable
from specs.schema.mesh import Mesh


class ToyTable(TrainTable):
    """An engine that answers for itself: it takes nothing from tables of rlctl's engines."""

    kind: Literal["toy"] = "toy"
    lean: bool = Field(False, description="Hold no second moment.")

    packages: ClassVar = ("numpy",)
    attention: ClassVar = "none"
    model_of: ClassVar = "bigram"
    checkpoint_format: ClassVar = "toy"
    checkpoint_bytes: ClassVar = 16

    def mesh(self, processes):
        return Mesh(1, processes, axes={})

    def memory(self, held):
        yield Part("weights and moments", held.tensors.elements * (12 if self.lean else 16) // held.ranks, exact=True)

    def problems(self, context):
        from specs.errors import Problem

        if self.lean and context.role == "ref":
            yield Problem("ref.engine.lean", "has no effect: nothing learns", "remove the key", "true")


class ShoutTable(FakeTrainTable):
    """The fake engine, told what to write into its log."""

    kind: Literal["shout"] = "shout"
    words: tuple[str, ...] = Field(("hey",), description="What it writes when it is built.")
    times: int = Field(1, gt=0, description="How often.")
'''

ENGINE = '''
from backends.fake.fake_train import FakeTrainEngine
from shout_engine.table import ShoutTable


class ShoutEngine(FakeTrainEngine):
    @classmethod
    def build(cls, config, rank):
        assert type(config.engine) is ShoutTable, config.engine
        print(*(config.engine.words * config.engine.times), flush=True)
        return super().build(config, rank)


class ToyEngine(FakeTrainEngine):
    """Trains as the fake engine does; its table says what is known of it."""


class PlainEngine(FakeTrainEngine):
    """Has no table of its own."""
'''

ENTRY_POINTS = """[rlctl.engines]
train.shout = shout_engine.engine:ShoutEngine
table.train.shout = shout_engine.table:ShoutTable
train.toy = shout_engine.engine:ToyEngine
table.train.toy = shout_engine.table:ToyTable
train.plain = shout_engine.engine:PlainEngine
train.broken = shout_engine.engine:PlainEngine
table.train.broken = shout_engine.nowhere:Table
train.stranger = shout_engine.engine:PlainEngine
table.train.stranger = shout_engine.table:ShoutTable
"""


def install(folder: Path) -> Path:
    """Write the distribution into `folder`, which belongs on PYTHONPATH."""
    package, info = folder / "shout_engine", folder / "shout_engine-1.0.dist-info"
    for made in (package, info):
        made.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "table.py").write_text(TABLE)
    (package / "engine.py").write_text(ENGINE)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shout-engine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    return folder
