"""Samples that the ranks of a sequence group share, with three meshes on four ranks at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from running import warm_torchrun
from sharing_worker import DEGREES, SAMPLES, engine_config, step_batch, step_of
from train_helpers import QWEN2, build_engine, make_batch, scale_of, write_model

from specs.wire.heartbeat import amount

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sharing")
    warm_torchrun(4, "sharing_worker.py", write_model(root / "model", QWEN2), root)
    return root


@pytest.fixture(scope="module")
def ranks(root: Path) -> list[dict[str, Any]]:
    return [json.loads((root / f"rank{rank}.json").read_text()) for rank in range(4)]


def groups(role: str) -> list[list[int]]:
    degree = DEGREES[role]
    return [list(range(first, first + degree)) for first in range(0, 4, degree)]


@pytest.mark.parametrize("role", list(DEGREES))
def test_a_group_has_the_samples_of_all_its_ranks(ranks: list[dict[str, Any]], role: str) -> None:
    """And says in its heartbeats that it computes them all."""
    whole = make_batch(6)
    for group in groups(role):
        together = whole.select([sample for rank in group for sample in SAMPLES[rank]])
        joined = [1 + token % DEGREES[role] for token in range(together.num_tokens)]
        told = f"update of {amount(len(together), 'sample')}, {together.num_tokens} tokens"
        told += f", shared by {len(group)} ranks" if len(group) > 1 else ""
        for rank in group:
            shared = ranks[rank]["shared"][role]
            assert shared["said"] == f"{told}, 0 micro-batches so far"
            assert (shared["tokens"], shared["joined"]) == (together["tokens_T"].tolist(), joined)


@pytest.mark.parametrize("role", list(DEGREES))
def test_three_meshes_compute_what_one_rank_does(root: Path, ranks: list[dict[str, Any]], role: str) -> None:
    """Log-probs or values, and gradient norms, step by step, of engines that took turns in the same processes."""
    alone = build_engine(engine_config(root / "model", role, 1))
    for step in range(2):
        batch = step_batch(step)
        steps = [rank["engines"][role][step] for rank in ranks]
        told = {int(token): value for each in steps for token, value in each["told"].items()}
        wanted_T, norm = step_of(alone, batch, scale_of(batch))
        assert np.abs(wanted_T).max() > 0.01 or (role, step) == ("critic", 0), "a new head says 0"
        np.testing.assert_allclose([told[token] for token in range(batch.num_tokens)], wanted_T, rtol=0, atol=1e-5)
        assert [each["norm"] for each in steps] == pytest.approx([norm] * 4, rel=1e-5)
