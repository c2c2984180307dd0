"""What `rlctl plan` says of parameters, gradients and optimizer state, against what the engines allocate."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from train_helpers import QWEN2, write_model

from rlctl.memory_parts import ADAM_BYTES
from rlctl.memory_states import Held, state_parts
from specs.engine_tables import DdpEngine, Fsdp2Engine, ZeroEngine
from specs.model_tensors import tensors_of_config
from specs.schema import Lora, Optimizer

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
BF16: dict[str, Any] = {"model": {"dtype": "bf16"}}
CASES: dict[str, dict[str, Any]] = {
    "ddp bf16": {"engine": DdpEngine(), **BF16},
    "ddp that never learns": {"engine": DdpEngine(), "optimizer": None},
    "ddp lora bf16": {"engine": DdpEngine(), "lora": Lora(rank=4), **BF16},
    "fsdp2 bf16": {"engine": Fsdp2Engine(), **BF16},
    "fsdp2 lora bf16": {"engine": Fsdp2Engine(), "lora": Lora(rank=4, targets=("q_proj", "down_proj")), **BF16},
}
if find_spec("deepspeed") is not None:
    SMALL = {"reduce_bucket_size": 1000}
    CUT: dict[str, Any] = {"stage3_param_persistence_threshold": 200, "stage3_prefetch_bucket_size": 1000, **SMALL}
    CASES |= {
        "zero1": {"engine": ZeroEngine(stage=1, deepspeed={"zero_optimization": SMALL})},
        "zero2 bf16": {"engine": ZeroEngine(stage=2, deepspeed={"zero_optimization": SMALL}), **BF16},
        "zero3": {"engine": ZeroEngine(stage=3, deepspeed={"zero_optimization": CUT})},
        "zero3 lora bf16": {
            "engine": ZeroEngine(stage=3, deepspeed={"zero_optimization": CUT}),
            "lora": Lora(rank=4),
            **BF16,
        },
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
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(RANKS)]
    worker = str(Path(__file__).with_name("memory_worker.py"))
    ended = subprocess.run(
        [*torchrun, worker, str(jobs)], capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    found: dict[str, dict[str, int]] = json.loads((root / "held0.json").read_text())
    return found


def held(case: str) -> Held:
    tensors = tensors_of_config(MODEL)
    assert tensors is not None
    changes = CASES[case]
    return Held(
        engine=changes["engine"],
        tensors=tensors,
        dtype=changes.get("model", {}).get("dtype", "fp32"),
        ranks=RANKS,
        device="cpu",
        optimizer=changes.get("optimizer", Optimizer()),
        lora=changes.get("lora"),
    )


@pytest.mark.parametrize("case", CASES)
def test_states_are_what_the_engine_allocates(measured: dict[str, dict[str, int]], case: str) -> None:
    parts = [part for part in state_parts(held(case)) if part.exact]
    assert sum(part.nbytes for part in parts) == pytest.approx(measured[case]["held"], rel=WITHIN)
    moments = sum(part.nbytes for part in parts if part.name == "Adam moments")
    assert moments == pytest.approx(measured[case]["moments"], rel=WITHIN)
    between = sum(part.nbytes for part in parts if "sync" in part.phases)
    if not case.startswith("zero"):  # DeepSpeed keeps its bucket
        assert between == pytest.approx(measured[case]["between"], rel=WITHIN)


def test_18_bytes_for_a_parameter_that_learns_in_bf16() -> None:
    parts = [part for part in state_parts(held("ddp bf16")) if part.exact]
    elements = held("ddp bf16").tensors.elements
    assert sum(part.nbytes for part in parts) == pytest.approx(elements * (2 + 4 + 4 + ADAM_BYTES), rel=WITHIN)
