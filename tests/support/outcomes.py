"""What the ranks of a job of `sharded_worker` left behind."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Outcome:
    """What the ranks of a job reported, and the weights after its last step."""

    ranks: list[dict[str, Any]]
    weights: dict[str, np.ndarray]

    def losses(self) -> list[float]:
        return [sum(rank["history"][i]["loss"] for rank in self.ranks) for i in range(len(self.ranks[0]["history"]))]

    def norms(self) -> list[float]:
        return [step["grad_norm"] for step in self.ranks[0]["history"]]

    def objectives(self) -> list[dict[str, float]]:
        """Return what the ranks reported together of each step with an objective."""
        steps = zip(*(rank["objectives"] for rank in self.ranks), strict=True)
        return [{name: sum(rank.get(name, 0) for rank in ranks) for name in {*ranks[0], *ranks[-1]}} for ranks in steps]

    def told(self, step: int) -> np.ndarray:
        """Log-probs or values of all tokens of the step's batch, put together from the ranks."""
        found = {int(token): value for rank in self.ranks for token, value in rank["history"][step]["told"].items()}
        return np.array([found[token] for token in range(len(found))])


def outcome(root: Path, name: str) -> Outcome:
    folder = root / name
    reports = [json.loads((folder / f"rank{i}.json").read_text()) for i in range(len(list(folder.glob("rank*.json"))))]
    with np.load(folder / "weights.npz") as weights:
        return Outcome(reports, dict(weights))
