"""What `rlctl plan` estimates of activations and logits, against measured peaks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlctl.memory.activations import Pass, learning_parts, scoring_parts
from specs.model_facts import model_facts
from specs.schema.engines.ddp_table import DdpTable

WITHIN = 0.2
LONGEST = 128


def case(
    hidden: int, inner: int, layers: int, vocab: int, own: dict[str, Any] | None = None, **more: Any
) -> dict[str, Any]:
    model: dict[str, Any] = {
        "model_type": "qwen2",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": vocab,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
        **(own or {}),
    }
    rest: dict[str, Any] = {
        "head": "lm",
        "tokens": 1024,
        "longest": LONGEST,
        "logits_chunk": 256,
        "recompute": False,
        "entropy": False,
        "scores": False,
    }
    rest["attention"] = "sdpa"
    return {"model": model, **rest, "dtype": "fp32", **more}


DELTA_NETS: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "head_dim": 64,
}
# Where activations dominate, where logits do, and where a recomputed layer does.
CASES = {
    "activations": case(256, 704, 4, 2000),
    "logits": case(128, 352, 1, 16000, entropy=True),
    "two layers of four recomputed": case(256, 704, 4, 2000, recompute=2),
    "layers with a state": case(256, 704, 3, 2000, DELTA_NETS),
    "layers with a state, recomputed": case(256, 704, 3, 2000, DELTA_NETS, recompute=True),
    "scores of whole sequences, recomputed": case(256, 704, 4, 2000, attention="eager", recompute=True, longest=512),
}


# Log-probs, where the free heap that a layer leaves could hold a third of the logits.
SCORED = {"wide layers, then logits": case(256, 2816, 2, 16000, logits_chunk=1024, scores=True)}
AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}  # memory goes back as soon as it is free


def peaks(root: Path, cases: dict[str, dict[str, Any]], **env: str) -> dict[str, int]:
    """Case → bytes. In a process of its own."""
    worker = [sys.executable, str(Path(__file__).parents[2] / "support" / "memory_peaks.py"), str(root)]
    worker.append(json.dumps(cases))
    whole = {**os.environ, "OMP_NUM_THREADS": "1", **env}
    ended = subprocess.run(worker, capture_output=True, text=True, env=whole)
    if "clear_refs" in ended.stderr:
        pytest.skip("this kernel does not let a process reset its peak")
    assert ended.returncode == 0, ended.stderr[-3000:]
    found: dict[str, int] = json.loads(ended.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    return peaks(tmp_path_factory.mktemp("peaks"), CASES, **AT_ONCE)


def pass_of(chosen: dict[str, Any]) -> Pass:
    facts = model_facts(chosen["model"])
    assert facts is not None
    return Pass(
        facts=facts,
        config=chosen["model"],
        dtype=chosen["dtype"],
        device="cpu",
        tokens=chosen["tokens"],
        longest=chosen["longest"],
        logits_chunk=chosen["logits_chunk"],
        attention=chosen["attention"],
        recomputed=facts.layers if chosen["recompute"] is True else chosen["recompute"],
        head=chosen["head"],
        entropy=chosen["entropy"],
        adds_head_gradient=DdpTable().adds_gradients_in_place(chosen["dtype"]),
    )


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", CASES)
def test_estimates_are_near_the_peaks(measured: dict[str, int], name: str) -> None:
    estimated = sum(part.nbytes for part in learning_parts(pass_of(CASES[name])))
    print(f"{name}: estimated {estimated / 2**20:.0f} MiB, measured {measured[name] / 2**20:.0f}")
    assert estimated == pytest.approx(measured[name], rel=WITHIN)


@pytest.mark.timeout(300)
def test_logits_find_the_layers_memory_given_back(tmp_path: Path) -> None:
    """With the allocator as it comes: what layers leave free is not held beside the logits."""
    for name, measured in peaks(tmp_path, SCORED).items():
        estimated = sum(part.nbytes for part in scoring_parts(pass_of(SCORED[name])))
        print(f"{name}: estimated {estimated / 2**20:.0f} MiB, measured {measured / 2**20:.0f}")
        assert estimated == pytest.approx(measured, rel=0.05)  # 135 MiB where nothing is given back
