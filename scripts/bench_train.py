"""Training half of a step: rlctl's `ddp` engine against a plain padded Hugging Face forward and backward.

    .venv/bin/python scripts/bench_train.py [--rounds 7] [--threads 2] [--against padded] [--model hybrid]

Both sides learn from the same sequences with the same loss (on-policy clipped surrogate, token mean) and take one
AdamW step. They alternate; the ratio of each round is printed, and its median. Two works, as in `bench_vs_trl`: short
ragged answers (limit 64, mean about 50) and a long tail (limit 256, mean about 60). `--against critic` has a critic of
the same size learn from the same sequences in the place of the padded side; `--against unshared` has the same engine
compute every prompt for each of its 8 answers, which are a quarter as long. `--model hybrid` has layers with a state.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from unittest import mock

from _bench import SMALL, actor_config, ddp_step, model_config, write_config

PROMPT_TOKENS = 12
# Three layers with a state to one of attention, as in Qwen3.5.
HYBRID = {
    **SMALL,
    "model_type": "qwen3_5_text",
    "architectures": ["Qwen3_5ForCausalLM"],
    "num_hidden_layers": 4,
    "head_dim": 32,
    **{"linear_num_value_heads": 4, "linear_num_key_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32},
    "layer_types": [*["linear_attention"] * 3, "full_attention"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--micro-batch-tokens", type=int, default=8192)
    parser.add_argument("--against", choices=("padded", "critic", "unshared"), default="padded")
    parser.add_argument("--model", choices=("attention", "hybrid"), default="attention")
    parser.add_argument("--vocabulary", type=int, default=SMALL["vocab_size"])
    parser.add_argument("--padded-batch", type=int, default=128, help="sequences per padded forward pass")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(args.threads)

    import numpy as np
    import torch

    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        model = SMALL if args.model == "attention" else HYBRID
        write_config(folder, {**model, "tie_word_embeddings": True, "vocab_size": args.vocabulary})
        for name in ("short ragged", "long tail") if args.against != "unshared" else ("shared prompts",):
            batch = make_batch(np.random.default_rng(0), name)
            ours = engine_step(folder, batch, args.micro_batch_tokens, "lm")
            if args.against == "critic":
                other = engine_step(folder, batch, args.micro_batch_tokens, "value")
            elif args.against == "unshared":
                with mock.patch("backends.train.engine.can_share_prompts", return_value=False):
                    other = engine_step(folder, batch, args.micro_batch_tokens, "lm")
                    other()  # packs once
            else:
                other = padded_step(folder, batch, args.padded_batch)
            report(name, batch, ours, other, args.against, args.rounds)


def make_batch(rng, name):
    import numpy as np

    from specs.wire.batch import Batch

    prompt_tokens, groups = PROMPT_TOKENS, 128
    if name == "shared prompts":
        answers, prompt_tokens, groups = np.full(128, 32), 128, 16
    elif name == "short ragged":
        answers = np.clip(rng.geometric(1 / 110, 128), 4, 64)
    else:
        answers = np.clip(rng.geometric(1 / 62, 128), 1, 256)
    lengths = answers + prompt_tokens
    prompts = rng.integers(0, SMALL["vocab_size"], (groups, prompt_tokens)).repeat(128 // groups, 0)
    tokens = [
        part
        for n, prompt in zip(answers, prompts, strict=True)
        for part in (prompt, rng.integers(0, SMALL["vocab_size"], n))
    ]
    total = int(lengths.sum())
    mask = np.concatenate([[0] * prompt_tokens + [1] * int(n) for n in answers]).astype(np.int8)
    return Batch(
        {
            "length_B": lengths.astype(np.int64),
            "tokens_T": np.concatenate(tokens).astype(np.int32),
            "loss_mask_T": mask,
            "advantage_T": np.repeat(rng.normal(size=128), lengths).astype(np.float32),
            "rollout_logprob_T": np.full(total, -4.0, dtype=np.float32),
            "value_T": np.zeros(total, dtype=np.float32),
            "return_T": np.repeat(rng.normal(size=128), lengths).astype(np.float32),
        }
    )


def engine_step(folder, batch, micro_batch_tokens, head):
    from specs.schema.algorithms.algorithm_tables import PpoClip, ValueLoss
    from specs.schema.engines.ddp_table import DdpTable

    loss = PpoClip(anchor="current") if head == "lm" else ValueLoss(value_clip=0.2)
    return ddp_step(
        actor_config(model_config(folder, 512, head=head), DdpTable(), micro_batch_tokens), batch, loss, 256
    )


def padded_step(folder, batch, padded_batch):
    """Do what a straightforward trainer does: pad to the longest, full logits, mask the loss."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0)
    longest = int(batch["length_B"].max())

    def pad(name, dtype):
        rows = [torch.from_numpy(part.copy()).to(dtype) for part in batch.sequences(name)]
        return torch.stack([torch.nn.functional.pad(row, (0, longest - len(row))) for row in rows])

    tokens, mask = pad("tokens_T", torch.long), pad("loss_mask_T", torch.float)
    advantage = pad("advantage_T", torch.float)
    present = (torch.arange(longest) < torch.from_numpy(batch["length_B"])[:, None]).long()

    def step():
        total = 0.0
        for part in torch.arange(len(tokens)).split(padded_batch):
            logits = model(input_ids=tokens[part], attention_mask=present[part], use_cache=False).logits[:, :-1]
            logprob = torch.log_softmax(logits.float(), -1).gather(2, tokens[part][:, 1:, None]).squeeze(2)
            ratio = (logprob - logprob.detach()).exp()
            token_loss = -torch.minimum(ratio * advantage[part][:, 1:], ratio.clamp(0.8, 1.2) * advantage[part][:, 1:])
            loss = (token_loss * mask[part][:, 1:]).sum() / mask.sum()
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
        optimizer.step()
        optimizer.zero_grad()
        return total, norm

    return step


def report(name, batch, ours, other, called, rounds):
    results = [ours(), other()], [ours(), other()]  # warm-up
    ratios, times = [], ([], [])
    for _ in range(rounds):
        for step, spent in zip((ours, other), times, strict=True):
            started = time.perf_counter()
            step()
            spent.append(time.perf_counter() - started)
        ratios.append(times[1][-1] / times[0][-1])
    first = results[0]
    print(f"{name}: {len(batch)} sequences, {batch.num_tokens} tokens; loss, norm ours {first[0]}, {called} {first[1]}")
    print(f"  ours   {min(times[0]):.3f} s best, {statistics.median(times[0]):.3f} s median")
    print(f"  {called} {min(times[1]):.3f} s best, {statistics.median(times[1]):.3f} s median")
    print(f"  {called} / ours: median {statistics.median(ratios):.2f}, of {' '.join(f'{r:.2f}' for r in ratios)}")


if __name__ == "__main__":
    main()
