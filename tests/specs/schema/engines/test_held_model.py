"""What `rlctl plan` says of parameters, gradients and optimizer state, against what the engines allocate."""

from __future__ import annotations

import json

import pytest
from memory_cases import CASES
from running import warm_torchrun
from train_helpers import QWEN2, write_model

from rlctl.models.model_tensors import tensors_of_config
from specs.schema.engines.held_model import HeldTrainer
from specs.schema.role_section import Optimizer

WITHIN = 0.01
RANKS = 2
# Sizes that no number of ranks divides, and large enough that what a model also holds (rotary frequencies) is nothing.
MODEL = {
    **QWEN2,
    "vocab_size": 511,
    "hidden_size": 60,
    "intermediate_size": 155,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
}
# The first test waits for the launch, on a machine that others may use.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int]]:
    """Case → bytes on rank 0, of all cases in one launch."""
    root = tmp_path_factory.mktemp("memory")
    write_model(root / "model", MODEL)
    jobs = root / "jobs.json"
    jobs.write_text(json.dumps({"model": str(root / "model"), "cases": list(CASES)}))
    warm_torchrun(RANKS, "memory_worker.py", jobs)
    found: dict[str, dict[str, int]] = json.loads((root / "held0.json").read_text())
    return found


def held(case: str) -> HeldTrainer:
    tensors = tensors_of_config(MODEL)
    assert tensors is not None
    changes = CASES[case]
    if "critic" in case:
        tensors = tensors.with_score_layer(MODEL["hidden_size"])
    return HeldTrainer(
        tensors=tensors,
        dtype=changes.get("model", {}).get("dtype", "fp32"),
        ranks=RANKS,
        device="cpu",
        optimizer=changes.get("optimizer", Optimizer()),
        lora=changes.get("lora"),
    )


@pytest.mark.parametrize("case", CASES)
def test_states_are_what_the_engine_allocates(measured: dict[str, dict[str, int]], case: str) -> None:
    parts = [part for part in CASES[case]["engine"].memory(held(case)) if part.exact]
    assert sum(part.nbytes for part in parts) == pytest.approx(measured[case]["held"], rel=WITHIN)
    moments = sum(part.nbytes for part in parts if part.name == "Adam moments")
    assert moments == pytest.approx(measured[case]["moments"], rel=WITHIN)
    between = sum(part.nbytes for part in parts if "sync" in part.phases)
    if not case.startswith("zero"):  # DeepSpeed keeps its bucket
        assert between == pytest.approx(measured[case]["between"], rel=WITHIN)
