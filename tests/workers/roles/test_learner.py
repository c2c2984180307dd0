"""A role that learns saves its state first, and what its model cannot prove is an answer, not a failure."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specs.errors import PeerGone
from specs.wire import bodies
from workers.roles.actor import Actor


class Model:
    """An engine whose positions end before the proof does."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def save(self, folder: Path) -> list[Path]:
        (folder / "model").write_text("state")
        return [folder / "model"]

    def greedy(self, prompts: Any, new_tokens: int) -> None:
        raise self.error


def actor_with(error: Exception) -> Actor:
    actor = Actor.__new__(Actor)
    actor._engine, actor.rank = Model(error), SimpleNamespace(rank=0)  # type: ignore[assignment]
    return actor


def save(actor: Actor, folder: Path, **proof: Any) -> Any:
    request: Any = SimpleNamespace(body=bodies.Save(folder=str(folder), **proof))
    return actor.save(request, None)[0]  # type: ignore[arg-type]


def test_a_proof_that_fails_costs_no_state(tmp_path: Path) -> None:
    actor = actor_with(IndexError("index 16 is out of range"))
    assert save(actor, tmp_path)["files"].keys() == {"model"}
    answer = save(actor, tmp_path, proof_prompts=[[1, 2]], proof_tokens=16)
    assert answer == {"files": {}, "unproven": "IndexError: index 16 is out of range"}


def test_a_peer_that_is_gone_is_none_of_the_proofs(tmp_path: Path) -> None:
    with pytest.raises(PeerGone):
        save(actor_with(PeerGone("rank 1", "is gone")), tmp_path, proof_prompts=[[1]], proof_tokens=1)
