"""The fsdp2 engine against a bare PyTorch loop (`fully_shard`, AdamW) over a model of the same shapes.

    .venv/bin/python -m torch.distributed.run --standalone --nproc_per_node=8 scripts/bench_fsdp2.py     (GPUs, bf16)
    .venv/bin/python scripts/bench_fsdp2.py --tiny                                       (one CPU: that it runs at all)

Both learn from the same sequences of equal length with the same loss (on-policy clipped surrogate, token mean) and make
one AdamW step a round, in turns. Printed: tokens/s, model FLOP utilisation (`specs/wire/model_flops.py`), peak memory
of each alone, and the ratio of each round.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time

from _bench import actor_config, model_config, write_config

from specs.wire.model_flops import DecoderSize, train_flops

FAMILY = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "max_position_embeddings": 32768}
# Qwen2-1.5B's shapes: 1.54 billion parameters.
LARGE = {
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
TINY = {**LARGE, "hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 4, "vocab_size": 512}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a small model in fp32, for a CPU")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sequences", type=int, default=16, help="per rank and optimizer step")
    parser.add_argument("--length", type=int, help="tokens of a sequence [2048; tiny: 64]")
    parser.add_argument("--per-pass", type=int, default=4, help="sequences in one forward pass")
    parser.add_argument("--peak-tflops", type=float, default=989.0, help="of one device in the dtype used")
    args = parser.parse_args()
    args.length = args.length or (64 if args.tiny else 2048)

    import torch

    from backends.protocol import Rank
    from backends.train.role_group import join_group, leave_group

    rank = Rank(*(int(os.environ.get(name, default)) for name, default in zip(NAMES, (0, 1, 0), strict=True)))
    device = "cpu" if args.tiny or not torch.cuda.is_available() else "cuda"
    join_group(rank, device, even_alone=True)
    with tempfile.TemporaryDirectory() as folder:
        write_config(folder, {**FAMILY, **(TINY if args.tiny else LARGE)})
        batch = make_batch(args, rank)
        sides = {}
        for name, build in (("rlctl", ours), ("bare loop", bare)):
            before = torch.cuda.memory_allocated() if device == "cuda" else 0
            step, parameters = build(folder, batch, args, rank, device)
            sides[name] = (step, peak_GiB(step, device, before))
        report(sides, batch, parameters, args, rank, device)
    leave_group()


NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


def make_batch(args, rank):
    import numpy as np

    from specs.wire.batch import Batch

    rng = np.random.default_rng(rank.rank)
    total = args.sequences * args.length
    mask = np.ones((args.sequences, args.length), dtype=np.int8)
    mask[:, : args.length // 8] = 0
    return Batch(
        {
            "length_B": np.full(args.sequences, args.length),
            "tokens_T": rng.integers(0, (TINY if args.tiny else LARGE)["vocab_size"], total).astype(np.int32),
            "loss_mask_T": mask.reshape(-1),
            "advantage_T": np.repeat(rng.normal(size=args.sequences), args.length).astype(np.float32),
            "rollout_logprob_T": np.full(total, -4.0, dtype=np.float32),
        }
    )


def ours(folder, batch, args, rank, device):
    from backends.fsdp2.engine import Fsdp2TrainEngine
    from backends.protocol import LossScale
    from specs.schema.algorithms.algorithm_tables import PpoClip
    from specs.schema.engines.fsdp2_table import Fsdp2Table

    model = model_config(folder, args.length, dtype=dtype_of(device), device=device)
    config = actor_config(model, Fsdp2Table(), args.per_pass * args.length)
    engine = Fsdp2TrainEngine.build(config, rank)
    tokens = int(batch["loss_mask_T"].sum()) * rank.world_size
    scale = LossScale(tokens, len(batch) * rank.world_size, args.length)
    loss = PpoClip(anchor="current")

    def step():
        value = engine.forward_backward(batch, loss, scale)["loss"]
        return value, engine.optim_step().grad_norm

    return step, engine.built().parameters


def bare(folder, batch, args, rank, device):
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    attention = "flash_attention_2" if device == "cuda" and has_flash() else "sdpa"
    config = AutoConfig.from_pretrained(folder)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention).to(device)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    mixed = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if device == "cuda" else MixedPrecisionPolicy()
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=mixed)
    fully_shard(model, mp_policy=mixed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0, fused=True)
    shape = (args.sequences, args.length)
    columns = {
        name: torch.from_numpy(batch[name].copy()).view(shape).to(device) for name in batch.columns if "_T" in name
    }
    tokens, total = columns["tokens_T"].long(), int(batch["loss_mask_T"].sum())

    def step():
        shown = 0.0
        parts = torch.arange(args.sequences).split(args.per_pass)
        for part in parts:
            model.set_requires_gradient_sync(part is parts[-1])
            logits = model(input_ids=tokens[part], use_cache=False).logits[:, :-1]
            logprob = -torch.nn.functional.cross_entropy(
                logits.flatten(0, 1).float(), tokens[part][:, 1:].flatten(), reduction="none"
            ).view(len(part), -1)
            ratio, advantage = (logprob - logprob.detach()).exp(), columns["advantage_T"][part][:, 1:]
            losses = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            loss = (losses * columns["loss_mask_T"][part][:, 1:]).sum() / total
            loss.backward()
            shown += loss.item() / rank.world_size
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor().item()
        optimizer.step()
        optimizer.zero_grad()
        return shown, norm

    return step, parameters


def dtype_of(device):
    return "bf16" if device == "cuda" else "fp32"


def has_flash():
    from importlib.util import find_spec

    return find_spec("flash_attn") is not None


def peak_GiB(step, device, before):
    """Warm-up; and the most that the device held meanwhile, above the bytes it held `before` this side was built."""
    import torch

    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    step()
    return (torch.cuda.max_memory_allocated() - before) / 2**30 if device == "cuda" else 0.0


def report(sides, batch, parameters, args, rank, device):
    import torch

    times = {name: [] for name in sides}
    for _ in range(args.rounds):
        for name, (step, _) in sides.items():
            started = time.perf_counter()
            step()
            if device == "cuda":
                torch.cuda.synchronize()
            times[name].append(time.perf_counter() - started)
    if rank.rank:
        return
    shapes = TINY if args.tiny else LARGE
    size = DecoderSize.of({**FAMILY, **shapes})
    assert size is not None
    flops = train_flops(size, batch["length_B"], int(batch["loss_mask_T"].sum())) / batch.num_tokens
    print(f"{parameters / 1e6:.2f} million parameters, {rank.world_size} × {device}, {batch.num_tokens} tokens a rank")
    for name, (_, peak) in sides.items():
        rate = batch.num_tokens / statistics.median(times[name])
        used = f", MFU {rate * flops / args.peak_tflops / 1e12:.3f}, peak {peak:.1f} GiB" if device == "cuda" else ""
        print(f"  {name:10s} {rate:10.0f} tokens/s a rank{used}")
    ratios = [bare / own for own, bare in zip(*times.values(), strict=True)]
    print(f"  rlctl / bare loop: median {statistics.median(ratios):.3f}, of {' '.join(f'{r:.3f}' for r in ratios)}")


if __name__ == "__main__":
    main()
