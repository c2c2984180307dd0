"""The torch rollout engine against `transformers.generate` on the same work.

    python scripts/bench_rollout.py [--repeats 5] [--threads 2] [--work 'long tail']

The same random model (2.4M parameters: hidden 256, 4 layers, vocabulary 52), prompts, temperature and limits; both
sides in one process, alternating, one warm-up each. Lengths are those of a random model that ends by chance: about
50 tokens on average, ragged. Seconds are per generated token, because the two draw different random numbers and so
different lengths. Reported: medians, and the median of the pairwise ratios.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median

# Without this, idle OpenMP threads spin against the working ones; both sides are quicker with it.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "20000")  # as rlctl starts its roles
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel, Qwen2Config

from backends.hf import build_model, named_weights, tensor_bytes
from backends.protocol import Rank
from backends.torch_rollout.engine import TorchRolloutEngine
from specs.batch import Batch
from specs.role_config import ModelConfig, RolloutConfig, Sampling

GROUPS, GROUP_SIZE, PROMPT_TOKENS, END_TOKEN, VOCAB = 8, 16, 24, 1, 52
WORKS = {"short ragged": 64, "long tail": 256}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--work", choices=list(WORKS), action="append", help="only this work (may be repeated)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        model, engine = build(folder)
        prompts = make_prompts()
        gc.freeze()  # as a role does once it is built; for both sides
        table = Table("work", "limit", "ours tok/s", "generate tok/s", "mean length", "ratio")
        for name in options.work or WORKS:
            limit = WORKS[name]
            ours, theirs, length = compare(engine, model, prompts, limit, options.repeats)
            ratio = median(t / o for t, o in zip(theirs, ours, strict=True))
            rates = [f"{1 / median(side):,.0f}" for side in (ours, theirs)]
            table.add_row(name, str(limit), *rates, f"{length:.0f}", f"{ratio:.1f}x")
    Console().print(table)


def build(folder: str) -> tuple[PreTrainedModel, TorchRolloutEngine]:
    shape = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        eos_token_id=END_TOKEN,
        pad_token_id=0,
    )
    shape.save_pretrained(folder)
    config = ModelConfig(
        path=folder,
        from_scratch=True,
        seed=0,
        dtype="fp32",
        attn_implementation="sdpa",
        trust_remote_code=False,
        device="cpu",
        max_sequence_tokens=PROMPT_TOKENS + max(WORKS.values()),
    )
    model = build_model(config, load_weights=True)
    rollout = RolloutConfig(
        model=config,
        engine={"kind": "torch"},
        max_prompt_tokens=PROMPT_TOKENS,
        max_response_tokens=max(WORKS.values()),
        stop=(),
    )
    engine = TorchRolloutEngine.build(rollout, Rank())
    weights = named_weights(model)
    for spec in engine.weight_specs():
        engine.import_weight(spec, tensor_bytes(weights[spec.name]))
    engine.finish_import()
    return model, engine


def make_prompts() -> Batch:
    rng = np.random.default_rng(0)
    rows = np.repeat(rng.integers(2, VOCAB, (GROUPS, PROMPT_TOKENS)), GROUP_SIZE, axis=0)
    samples = len(rows)
    group_B = np.repeat(np.arange(GROUPS), GROUP_SIZE)
    return Batch(
        {
            "tokens_T": rows.reshape(-1),
            "length_B": np.full(samples, PROMPT_TOKENS),
            "group_B": group_B,
            "id_B": np.arange(samples),
            "row_B": group_B,
        }
    )


def compare(
    engine: TorchRolloutEngine, model: PreTrainedModel, prompts: Batch, limit: int, repeats: int
) -> tuple[list[float], list[float], float]:
    """Seconds per token of ours and of theirs, and the mean length of ours."""
    ids = torch.from_numpy(prompts["tokens_T"].reshape(len(prompts), -1))

    def ours(seed: int) -> int:
        sampling = Sampling(seed=seed, max_response_tokens=limit)
        return int(engine.generate(prompts, sampling, lambda batch: None)["generated_tokens"])

    def theirs(seed: int) -> int:
        torch.manual_seed(seed)
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            top_k=0,
            max_new_tokens=limit,
            return_dict_in_generate=True,
        ).sequences[:, PROMPT_TOKENS:]
        ended = (out == END_TOKEN).int()
        return int(((ended.cumsum(1) - ended) == 0).sum())

    seconds: dict[Callable[[int], int], list[float]] = {ours: [], theirs: []}
    lengths = []
    for repeat in range(repeats + 1):
        for side, taken in seconds.items():
            started = time.perf_counter()
            tokens = side(repeat)
            taken.append((time.perf_counter() - started) / tokens)
            if side is ours:
                lengths.append(tokens / len(prompts))
    return seconds[ours][1:], seconds[theirs][1:], mean(lengths)


if __name__ == "__main__":
    main()
