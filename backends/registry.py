"""Engines by kind. Nothing is imported before it is asked for.

Other packages bring theirs by entry points (`specs/foreign_engines.py`).
"""

from __future__ import annotations

from importlib import import_module

from backends.protocol import RolloutEngine, TrainEngine
from specs.foreign_engines import Family, foreign_engine, foreign_kinds

TRAIN_ENGINES = {
    "ddp": "backends.ddp.engine:DdpTrainEngine",
    "fsdp2": "backends.fsdp2.engine:Fsdp2TrainEngine",
    "zero": "backends.zero.engine:ZeroTrainEngine",
    "zero3": "backends.zero.engine:ZeroTrainEngine",
    "fake": "backends.fake.train:FakeTrainEngine",
}
ROLLOUT_ENGINES = {
    "torch": "backends.torch_rollout.engine:TorchRolloutEngine",
    "vllm": "backends.vllm_rollout.engine:VllmRolloutEngine",
    "sglang": "backends.sglang_rollout.engine:SglangRolloutEngine",
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


def _find(family: Family, kind: str, own: dict[str, str]) -> type:
    if kind in own:
        module, _, name = own[kind].partition(":")
        return getattr(import_module(module), name)
    engine = foreign_engine(family, kind)
    if engine is None:
        known = ", ".join([*own, *foreign_kinds(family)])
        raise LookupError(f"no {family} engine of kind {kind!r}; known: {known}")
    return engine
