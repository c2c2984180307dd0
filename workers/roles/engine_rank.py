"""Base of every rank with an engine: builds and reports it, offloads and reloads it, closes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from backends import memory
from backends.protocol import Rank, RolloutEngine, TrainEngine
from specs.wire import bodies
from specs.wire.role_config import RolloutConfig, TrainConfig
from workers.rank_report import as_built
from workers.serve import Emit, Reply, Request

Engine = TypeVar("Engine", TrainEngine, RolloutEngine)


class EngineRank(Generic[Engine]):
    """A rank that holds an engine on a device."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self._engine: Engine | None = None
        self.device = "cpu"
        self.before_GiB = 0.0  # held before the model was built
        self.built_GiB = 0.0  # the most that was held while it was

    @property
    def engine(self) -> Engine:
        assert self._engine is not None, "build comes first"
        return self._engine

    @property
    def used_GiB(self) -> float:
        """Peak memory of the model: beyond what was held before it was built, libraries on the CPU."""
        return max(0.0, self.peak_GiB() - self.before_GiB, self.built_GiB - self.before_GiB)

    def held_GiB(self) -> float:
        return memory.held_GiB(self.device)

    def peak_GiB(self) -> float:
        return memory.peak_GiB(self.device)

    def hold(self, role: str, config: TrainConfig | RolloutConfig, kind: Any) -> Reply:
        """Build an engine of this class, and report what was built."""
        self.device = config.model.device
        memory.keep_freed(self.device)
        kind.import_code(config)
        self.before_GiB = memory.held_GiB(self.device)
        with memory.sampled_peak(self.device) as most_GiB:
            self._engine = kind.build(config, self.rank)
        self.built_GiB = most_GiB()
        memory.hand_back(self.device)
        memory.forget_peak(self.device)
        report = as_built(role, self.rank, engine=config.engine.kind, device=self.device, model=self.engine.built())
        return report.model_dump(), {}

    def leave(self, let_go: Callable[[], None]) -> Reply:
        """Free the device for other roles. Returns the memory held before and after, in GiB."""
        before = self.held_GiB()
        let_go()
        memory.hand_back(self.device)
        return {"before_GiB": before, "after_GiB": self.held_GiB()}, {}

    def come_back(self, bring_back: Callable[[], None]) -> Reply:
        """Undo `leave`; returns the same."""
        before = self.held_GiB()
        bring_back()
        return {"before_GiB": before, "after_GiB": self.held_GiB()}, {}

    def close(self, call: Request[bodies.Nothing], emit: Emit) -> Reply:
        if self._engine is not None:
            self._engine.close()
        return {}, {}
