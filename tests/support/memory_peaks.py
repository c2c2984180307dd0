"""A process that measures the peaks of a micro-batch's forward and backward pass, or of one that gives log-probs
(`test_activations.py`).

Started with MALLOC_MMAP_THRESHOLD_ small, so that resident memory follows what torch has allocated; or without, as a
role is.
"""

from __future__ import annotations

import gc
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1]), str(HERE.parent / "support")]
torch.set_num_threads(1)

from peak_memory import grown_bytes  # noqa: E402
from train_helpers import build_engine, grpo, scale_of, train_config, write_model  # noqa: E402

from backends.memory import hand_back  # noqa: E402
from specs.schema.algorithms.algorithm_tables import ValueLoss  # noqa: E402
from specs.schema.engines.ddp_table import DdpTable  # noqa: E402
from specs.wire.batch import Batch  # noqa: E402


def full_batch(tokens: int, longest: int, vocab: int) -> Batch:
    """Sequences as long as they may be, nearly all of each an answer."""
    count, rng = tokens // longest, np.random.default_rng(0)
    total = count * longest
    return Batch(
        {
            "length_B": np.full(count, longest),
            "tokens_T": rng.integers(0, vocab, total).astype(np.int32),
            "loss_mask_T": np.array(([0] * 4 + [1] * (longest - 4)) * count, dtype=np.int8),
            "advantage_T": rng.normal(size=total).astype(np.float32),
            "rollout_logprob_T": rng.normal(-3, 0.3, total).astype(np.float32),
            **{name: rng.normal(size=total).astype(np.float32) for name in ("value_T", "return_T")},
        }
    )


def peak_of(folder: Path, case: dict[str, Any]) -> int:
    """Bytes that one micro-batch needs beyond what the engine holds."""
    config = train_config(
        write_model(folder, case["model"]),
        engine=DdpTable(logits_chunk_tokens=case["logits_chunk"]),
        micro_batch_tokens=case["tokens"],
        gradient_checkpointing=case["recompute"],
        model={
            "max_sequence_tokens": case["longest"],
            "head": case["head"],
            "dtype": case["dtype"],
            "attn_implementation": case["attention"],
        },
    )
    engine = build_engine(config)
    policy = grpo(anchor="current", entropy_coef=0.01 if case["entropy"] else 0.0)
    algorithm = policy if case["head"] == "lm" else ValueLoss(value_clip=0.2)
    for tokens in (case["longest"], case["tokens"]):  # the first one warms up
        batch = full_batch(tokens, case["longest"], case["model"]["vocab_size"])
        gc.collect()
        peak = grown_bytes(partial(engine.forward_backward, batch, algorithm, scale_of(batch)))
    return peak


def scored_peak_of(folder: Path, case: dict[str, Any]) -> int:
    """Bytes that a micro-batch's log-probs need beyond the frozen model."""
    config = train_config(
        write_model(folder, case["model"]),
        optimizer=None,
        temperature=1.0,
        engine=DdpTable(logits_chunk_tokens=case["logits_chunk"]),
        micro_batch_tokens=case["tokens"],
        model={"max_sequence_tokens": case["longest"]},
    )
    engine = build_engine(config)
    batch = full_batch(case["tokens"], case["longest"], case["model"]["vocab_size"])
    engine.forward(batch)  # libraries take what they keep
    gc.collect()
    hand_back("cpu")
    return grown_bytes(partial(engine.forward, batch))


if __name__ == "__main__":
    root, cases = Path(sys.argv[1]), json.loads(sys.argv[2])
    measures = {True: scored_peak_of, False: peak_of}
    print(json.dumps({
        name: measures[case["scores"]](root / str(number), case) for number, (name, case) in enumerate(cases.items())
    }))  # fmt: skip
