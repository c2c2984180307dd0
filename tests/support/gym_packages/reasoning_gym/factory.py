"""Two data sets with the traps of the real ones: scores that tell tuples from lists and need the options, a score that
raises at what it cannot read, one that never ends, and a process that dies."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

print("the package prints this where its reader expects rows")


@dataclass
class SumConfig:
    terms: int = 2
    seed: int | None = None
    size: int = 500

    def validate(self) -> None:
        assert self.terms > 1, "terms must be > 1"


class Sum:
    def __init__(self, config: SumConfig) -> None:
        self.config = config

    def __getitem__(self, index: int) -> dict[str, Any]:
        assert self.config.seed is not None
        numbers = tuple(self.config.seed + index + term for term in range(self.config.terms))
        text = " + ".join(map(str, numbers))
        return {"question": f"{text} =", "answer": str(sum(numbers)), "metadata": {"numbers": numbers, "by": {1: "a"}}}

    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float:
        numbers = entry["metadata"]["numbers"]
        assert isinstance(numbers, tuple)
        assert entry["metadata"]["by"] == {1: "a"}
        assert len(numbers) == self.config.terms
        return float(int(answer or "") == sum(numbers))


class Slow(Sum):
    def __getitem__(self, index: int) -> dict[str, Any]:
        if index:
            time.sleep(600)
        return super().__getitem__(index)


class Dying(Sum):
    def __getitem__(self, index: int) -> dict[str, Any]:
        os._exit(7)


DATASETS = {"tiny_sum": (Sum, SumConfig), "slow": (Slow, SumConfig), "dying": (Dying, SumConfig)}


def create_dataset(name: str, **options: Any) -> Sum:
    kind, config_kind = DATASETS[name]
    config = config_kind(**options)
    config.validate()
    return kind(config)
