"""Peak memory of a micro-batch's log-probs and of its forward and backward pass, on the CPU in fp32.

    .venv/bin/python scripts/bench_memory.py [--tokens 8192] [--only WORD]

Each case runs in a process of its own, in which free memory goes back to the system at once. A peak is what the
resident set grows by: the engine's own weights and gradients, the head's among them, are there before. Needs Linux,
and a kernel that lets a process reset its peak (/proc/self/clear_refs).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from _bench import actor_config, model_config, write_config

MIB = 2**20
LAYERS = 8
SHAPE = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}
LONGEST = 1024
SMALL_VOCABULARY, LARGE_VOCABULARY = 1_000, 150_000


def case(vocabulary: int, *, head: str = "lm", **trainer: Any) -> dict[str, Any]:
    return {"vocabulary": vocabulary, "head": head, "trainer": trainer}


ALL, HALF = {"gradient_checkpointing": True}, {"gradient_checkpointing": LAYERS // 2}
CASES: dict[str, dict[str, Any]] = {
    "kept, vocabulary 1k": case(SMALL_VOCABULARY),
    "kept, vocabulary 150k": case(LARGE_VOCABULARY),
    "half recomputed, vocabulary 1k": case(SMALL_VOCABULARY, **HALF),
    "half recomputed, vocabulary 150k": case(LARGE_VOCABULARY, **HALF),
    "recomputed, vocabulary 1k": case(SMALL_VOCABULARY, **ALL),
    "recomputed, vocabulary 150k": case(LARGE_VOCABULARY, **ALL),
    "critic, vocabulary 1k": case(SMALL_VOCABULARY, head="value"),
    "critic, vocabulary 150k": case(LARGE_VOCABULARY, head="value"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        print(json.dumps(measure(CASES[args.case], args.tokens)))
        return
    for name in (name for name in CASES if args.only in name):
        command = [sys.executable, __file__, "--tokens", str(args.tokens), "--case", name]
        env = {**os.environ, "OMP_NUM_THREADS": "2", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
        ended = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
        found = json.loads(ended.stdout.splitlines()[-1])
        print(f"{name:33}", *(f"{what} {MiB:5.0f} MiB  " for what, MiB in found.items()), flush=True)


def measure(chosen: dict[str, Any], tokens: int) -> dict[str, float]:
    from backends.protocol import LossScale, Rank
    from backends.registry import train_engine
    from specs.schema.algorithms.algorithm_tables import PpoClip, ValueLoss
    from specs.schema.engines.ddp_table import DdpTable

    shape = {**SHAPE, "vocab_size": chosen["vocabulary"]}
    with tempfile.TemporaryDirectory() as folder:
        write_config(folder, shape)
        model = model_config(folder, LONGEST, head=chosen["head"])
        config = actor_config(model, DdpTable(), tokens).model_copy(update=chosen["trainer"])
        engine = train_engine("ddp").build(config, Rank())
    loss = PpoClip(anchor="current") if chosen["head"] == "lm" else ValueLoss()
    found: dict[str, float] = {}
    for count in (1, tokens // LONGEST):  # the first warms up, and touches what the engine holds
        batch = full_batch(count, chosen["vocabulary"])
        rows = int(batch["loss_mask_T"].sum())
        told = engine.forward if chosen["head"] == "lm" else engine.values
        scale = LossScale(rows, count, LONGEST)
        found["forward pass alone"] = grown_bytes(partial(told, batch)) / MIB
        found["with backward pass"] = grown_bytes(partial(engine.forward_backward, batch, loss, scale)) / MIB
    return found


def full_batch(count: int, vocabulary: int) -> Any:
    """Sequences as long as they may be, nearly all of each an answer."""
    import numpy as np

    from specs.wire.batch import Batch

    rng, total = np.random.default_rng(0), count * LONGEST
    return Batch(
        {
            "length_B": np.full(count, LONGEST, dtype=np.int64),
            "tokens_T": rng.integers(0, vocabulary, total).astype(np.int32),
            "loss_mask_T": np.tile([0] * 4 + [1] * (LONGEST - 4), count).astype(np.int8),
            "advantage_T": rng.normal(size=total).astype(np.float32),
            "rollout_logprob_T": rng.normal(-3, 0.3, total).astype(np.float32),
            **{name: rng.normal(size=total).astype(np.float32) for name in ("value_T", "return_T")},
        }
    )


def grown_bytes(work: Callable[[], object]) -> int:
    """How far the peak of this process rises above what it holds now."""
    gc.collect()
    before = _status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    work()
    return _status_bytes("VmHWM") - before


def _status_bytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1]) * 1024


if __name__ == "__main__":
    main()
