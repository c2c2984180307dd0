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
import tempfile
import time
from collections.abc import Callable
from statistics import mean, median

import _bench
import torch
from _bench import GROUP_SIZE, GROUPS, PROMPT_TOKENS, WORKS
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel

from backends.torch_rollout.engine import TorchRolloutEngine
from specs.wire.batch import Batch
from specs.wire.role_config import Sampling


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--work", choices=list(WORKS), action="append", help="only this work (may be repeated)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        _bench.write_config(folder, _bench.SMALL)
        config = _bench.model_config(folder, PROMPT_TOKENS + max(WORKS.values()))
        model, engine = _bench.torch_sampler(config, PROMPT_TOKENS)
        prompts = _bench.group_prompts(GROUPS, GROUP_SIZE, PROMPT_TOKENS, _bench.SMALL["vocab_size"])
        gc.freeze()  # as a role does once it is built; for both sides
        table = Table("work", "limit", "ours tok/s", "generate tok/s", "mean length", "ratio")
        for name in options.work or WORKS:
            limit = WORKS[name]
            ours, theirs, length = compare(engine, model, prompts, limit, options.repeats)
            ratio = median(t / o for t, o in zip(theirs, ours, strict=True))
            rates = [f"{1 / median(side):,.0f}" for side in (ours, theirs)]
            table.add_row(name, str(limit), *rates, f"{length:.0f}", f"{ratio:.1f}x")
    Console().print(table)


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
        ended = (out == _bench.SMALL["eos_token_id"]).int()
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
