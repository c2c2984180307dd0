"""Engines by kind. Nothing is imported before it is asked for.

Another package adds an engine with an entry point in the group `rlctl.engines`, named `train.<kind>` or
`rollout.<kind>`.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points

from backends.protocol import RolloutEngine, TrainEngine

TRAIN_ENGINES = {
    "ddp": "backends.ddp.engine:DdpTrainEngine",
    "fsdp2": "backends.fsdp2.engine:Fsdp2TrainEngine",
    "zero": "backends.zero.engine:ZeroTrainEngine",
    "zero3": "backends.zero.engine:ZeroTrainEngine",
    "fake": "backends.fake.train:FakeTrainEngine",
}
ROLLOUT_ENGINES = {
    "torch": "backends.torch_rollout.engine:TorchRolloutEngine",
    "fake": "backends.fake.rollout:FakeRolloutEngine",
}


def train_engine(kind: str) -> type[TrainEngine]:
    engine = _find("train", kind, TRAIN_ENGINES)
    assert issubclass(engine, TrainEngine)
    return engine


def rollout_engine(kind: str) -> type[RolloutEngine]:
    engine = _find("rollout", kind, ROLLOUT_ENGINES)
    assert issubclass(engine, RolloutEngine)
    return engine


def _find(family: str, kind: str, known: dict[str, str]) -> type:
    if kind in known:
        module, _, name = known[kind].partition(":")
        return getattr(import_module(module), name)
    for point in entry_points(group="rlctl.engines"):
        if point.name == f"{family}.{kind}":
            return point.load()
    raise LookupError(f"no {family} engine of kind {kind!r}; known: {', '.join(known)}")
