"""A distribution made on the spot: what `pip install` leaves of a package that brings engines."""

from __future__ import annotations

from pathlib import Path

TABLE = '''
"""The spec table of a train engine that another package brings."""

from typing import Literal

from pydantic import Field

from specs.engine_tables import FakeTrainEngine


class ShoutTable(FakeTrainEngine):
    """The fake engine, told what to write into its log."""

    kind: Literal["shout"] = "shout"
    words: tuple[str, ...] = Field(("hey",), description="What it writes when it is built.")
    times: int = Field(1, gt=0, description="How often.")
'''

ENGINE = '''
from backends.fake.train import FakeTrainEngine
from shout_engine.table import ShoutTable


class ShoutEngine(FakeTrainEngine):
    @classmethod
    def build(cls, config, rank):
        assert type(config.engine) is ShoutTable, config.engine
        print(*(config.engine.words * config.engine.times), flush=True)
        return super().build(config, rank)


class PlainEngine(FakeTrainEngine):
    """Has no table of its own."""
'''

ENTRY_POINTS = """[rlctl.engines]
train.shout = shout_engine.engine:ShoutEngine
table.train.shout = shout_engine.table:ShoutTable
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
