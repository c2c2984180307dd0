#!/usr/bin/env python
"""One long sequence on 1, 2 and 4 ranks that share it: time, memory and bytes of a forward and backward pass.

    .venv/bin/python scripts/bench_ulysses.py [--tokens 16384] [--degrees 1 2 4] [--rounds 2] [--limit-gib 4]
    .venv/bin/python scripts/bench_ulysses.py --memory-only --recompute

Each job starts `ddp` ranks of one thread, which learn from one sequence through the whole engine. Jobs take turns,
`--rounds` times; a time is the slowest rank's, the table has the best round. Memory is measured in jobs of its own,
where each tensor is a mapping of its own: by how much resident memory rises above what the engine holds, on the rank
where it rises most. Two lengths say what a token costs, and from that follows the longest sequence whose rank stays
under `--limit-gib`, libraries and weights included.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from _bench import ROOT, actor_config, model_config, write_config

sys.path.insert(0, str(ROOT / "tests" / "support"))

GIB = 2**30
# 3.3 million parameters; fewer key-value heads than 4 ranks, which get copies.
MODEL = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
    "max_position_embeddings": 1048576,
    "tie_word_embeddings": True,
}
PROMPT_TOKENS = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--degrees", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--limit-gib", type=float, default=4.0)
    parser.add_argument("--recompute", action="store_true", help="gradient_checkpointing")
    parser.add_argument("--attention", default="sdpa")
    parser.add_argument("--memory-only", action="store_true")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        rank_of_job(args)
        return
    with tempfile.TemporaryDirectory() as folder:
        write_config(folder, MODEL)
        memory = {degree: run_job(args, folder, degree, measure="memory") for degree in args.degrees}
        times: dict[int, list[float]] = {degree: [] for degree in args.degrees}
        for _ in range(0 if args.memory_only else args.rounds):
            for degree, found in times.items():
                found.append(max(run_job(args, folder, degree, measure="time"), key=lambda rank: rank["s"])["s"])
    report(args, memory, times)


def run_job(args: argparse.Namespace, folder: str, degree: int, *, measure: str) -> list[dict[str, float]]:
    """What each rank measured."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={degree}"]
    words = [__file__, "--tokens", str(args.tokens), "--attention", args.attention, "--job", f"{folder}:{measure}"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    if measure == "memory":
        env["MALLOC_MMAP_THRESHOLD_"] = "65536"
    command = [sys.executable, *launcher, *words, *(["--recompute"] if args.recompute else [])]
    subprocess.run(command, check=True, env=env, stdout=subprocess.DEVNULL)
    return [json.loads(Path(folder, f"rank{rank}.json").read_text()) for rank in range(degree)]


def report(args: argparse.Namespace, memory: dict[int, list[dict[str, float]]], times: dict[int, list[float]]) -> None:
    one, best = args.degrees[0], {degree: min(found, default=0.0) for degree, found in times.items()}
    peak = {degree: max(rank["peak"] for rank in ranks) for degree, ranks in memory.items()}
    print(f"a sequence of {args.tokens} tokens, {args.attention}{', recomputed' if args.recompute else ''}\n")
    print(
        f"| ranks | forward + backward | against {one} | peak per rank | against {one} | messages | each (mean) ",
        end="",
    )
    print(f"| bytes per token | longest in {args.limit_gib:g} GiB |\n|---|---|---|---|---|---|---|---|---|")
    for degree, ranks in memory.items():
        first, half = ranks[0], max(rank["half"] for rank in ranks)
        token = (peak[degree] - half) / (args.tokens / 2)
        room = args.limit_gib * GIB - max(rank["held"] for rank in ranks) - (peak[degree] - token * args.tokens)
        mean = first["bytes"] / first["messages"] if first["messages"] else 0
        cells = [
            str(degree),
            f"{best[degree]:.2f} s" if best[degree] else "–",
            f"{best[degree] / best[one]:.2f}×" if best[degree] else "–",
            f"{peak[degree] / 2**20:.0f} MiB",
            f"{peak[degree] / peak[one]:.2f}×",
            f"{first['messages']:.0f}",
            f"{mean / 2**20:.1f} MiB",
            f"{token:.0f}",
            f"{int(room / token):,}".replace(",", " "),
        ]
        print(f"| {' | '.join(cells)} |")


def rank_of_job(args: argparse.Namespace) -> None:
    import torch
    from peak_memory import grown_bytes, status_bytes
    from torch import distributed as dist
    from ulysses_worker import counted_messages

    from backends.ddp.engine import DdpTrainEngine
    from backends.protocol import LossScale, Rank
    from specs.schema.algorithms.algorithm_tables import PpoClip
    from specs.schema.engines.ddp_table import DdpTable

    torch.set_num_threads(1)
    folder, measure = args.job.rsplit(":", 1)
    rank = Rank(*(int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")))
    model = model_config(folder, args.tokens, attn_implementation=args.attention)
    config = actor_config(model, DdpTable(), -(-args.tokens // rank.world_size)).model_copy(
        update={"sequence_parallel": rank.world_size, "gradient_checkpointing": args.recompute}
    )
    engine = DdpTrainEngine.build(config, rank)

    def learn(tokens: int) -> None:
        # All samples come from rank 0, as one sample of a driver's would.
        batch = one_sequence(tokens).select([0] if rank.rank == 0 else [])
        engine.forward_backward(batch, PpoClip(anchor="current"), LossScale(tokens - PROMPT_TOKENS, 1, tokens))

    found: dict[str, float] = {}
    learn(512)  # connections, kernels
    if measure == "memory":
        gc.collect()
        found["held"] = status_bytes("VmRSS")
        found["half"] = grown_bytes(partial(learn, args.tokens // 2))
        gc.collect()
        with counted_messages() as sizes:
            found["peak"] = grown_bytes(partial(learn, args.tokens))
        found |= {"messages": len(sizes), "bytes": sum(sizes)}
    else:
        if rank.world_size > 1:
            dist.barrier()
        begun = time.perf_counter()
        learn(args.tokens)
        found["s"] = time.perf_counter() - begun
    Path(folder, f"rank{rank.rank}.json").write_text(json.dumps(found))
    engine.close()


def one_sequence(tokens: int) -> Any:
    import numpy as np

    from specs.wire.batch import Batch

    draw = np.random.default_rng(0)
    return Batch(
        {
            "length_B": np.array([tokens]),
            "tokens_T": draw.integers(0, MODEL["vocab_size"], tokens).astype(np.int32),
            "loss_mask_T": np.repeat([0, 1], [PROMPT_TOKENS, tokens - PROMPT_TOKENS]).astype(np.int8),
            "advantage_T": draw.normal(size=tokens).astype(np.float32),
            "rollout_logprob_T": np.full(tokens, -7.0, dtype=np.float32),
        }
    )


if __name__ == "__main__":
    main()
