"""How evenly packing shares out a batch, and what it wastes. No model is built and no process started.

    .venv/bin/python scripts/bench_packing.py [--shape 7B] [--budget 16384] [--data FOLDER]

Each batch of lengths goes to ranks and there into micro-batches, in two ways. Plainly: even tokens and first-fit
decreasing, groups whole where no rank then has more than 1.1 of the average. And as rlctl does. Printed, plain → rlctl:

imbalance   FLOPs of the heaviest rank by the average of all (`specs/wire/model_flops.py`)
lock step   FLOPs of the heaviest micro-batch of each round, added up, by the same average: what ranks take that wait
            for one another in every round, as those of `fsdp2` and `zero` do
rounds      micro-batches of the rank with the most; idle: how many rounds of all ranks have nothing in them
waste       rows that are computed although the batch does not need them: prompts once more, rows of idle rounds
sdpa        what plain sdpa computes in attention beyond what tokens need to see, of all FLOPs: it fills sequences of
            like length up to the longest and repeats a shared prompt for each
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import _bench  # noqa: F401  (finds the packages)
import numpy as np
from numpy.typing import NDArray

from specs.wire.batch import Batch
from specs.wire.model_flops import DecoderSize
from specs.wire.partition import even_rows, fewest_rows, in_step, shards
from specs.wire.sequence_work import SequenceWork

SHAPES = {
    "0.5B": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14}
    | {"num_key_value_heads": 2, "vocab_size": 151936},
    "7B": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28}
    | {"num_key_value_heads": 4, "vocab_size": 152064},
}
BUDGET = 16384
Lengths = tuple[NDArray[np.int64], NDArray[np.int64]]  # of the prompt of each group, of each completion [group, member]
Parts = list[list[int]]


# ── lengths ───────────────────────────────────────────────────────────────────────────────────────


def gsm8k(file: Path) -> Callable[[int, int, int], Lengths]:
    """GSM8K's questions and solutions in bytes, which are the tokens of the built-in model; completions of a question
    are around its solution (a quarter of it up or down)."""
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    question, answer = (np.array([len(row[key].encode()) for row in rows]) for key in ("question", "answer"))

    def draw(groups: int, size: int, seed: int) -> Lengths:
        rng = np.random.default_rng(seed)
        chosen = rng.choice(len(question), groups, replace=groups > len(question))
        spread = rng.lognormal(0, 0.25, (groups, size))
        return question[chosen], np.maximum(1, answer[chosen, None] * spread).astype(np.int64)

    return draw


def long_tail(groups: int, size: int, seed: int) -> Lengths:
    """Log-normal, a median of 500 tokens, cut at the longest that fits the budget: what reasoning models write."""
    rng = np.random.default_rng(seed)
    of_group, spread = rng.lognormal(6.2, 0.8, (groups, 1)), rng.lognormal(0, 0.6, (groups, size))
    return rng.integers(50, 400, groups), np.clip(of_group * spread, 1, BUDGET - 400).astype(np.int64)


def two_kinds(groups: int, size: int, seed: int) -> Lengths:
    """A tenth of the completions run to 12k tokens, the others are short."""
    rng = np.random.default_rng(seed)
    short, long = rng.integers(50, 400, (groups, size)), rng.integers(11_000, 12_000, (groups, size))
    return rng.integers(50, 200, groups), np.where(rng.random((groups, size)) < 0.1, long, short)


def even_lengths(groups: int, size: int, seed: int) -> Lengths:
    rng = np.random.default_rng(seed)
    return rng.integers(100, 200, groups), rng.integers(1, 2000, (groups, size))


def make_batch(lengths: Lengths, seed: int = 0) -> Batch:
    """Random tokens; the members of a group begin with the same prompt."""
    prompts, completions = lengths
    rng = np.random.default_rng(seed)
    size = completions.shape[1]
    prompt_B, own_B = np.repeat(prompts, size), completions.ravel()
    length_B = prompt_B + own_B
    tokens = [
        part
        for prompt, row in zip(prompts, completions, strict=True)
        for text in [rng.integers(0, 50_000, prompt)]
        for own in row
        for part in (text, rng.integers(0, 50_000, own))
    ]
    kinds = np.tile([0, 1], len(length_B)).astype(np.int8)
    return Batch(
        {
            "length_B": length_B,
            "tokens_T": np.concatenate(tokens).astype(np.int32),
            "loss_mask_T": np.repeat(kinds, np.stack([prompt_B, own_B], axis=1).ravel()),
            "group_B": np.repeat(np.arange(len(prompts)), size),
        }
    )


# ── the two ways ──────────────────────────────────────────────────────────────────────────────────


def plain(batch: Batch, size: DecoderSize, ranks: int, budget: int) -> list[tuple[SequenceWork, Parts]]:
    """Even tokens, then first-fit decreasing of whole families."""
    length_B, (_, group_B) = batch["length_B"], np.unique(batch["group_B"], return_inverse=True)
    owner_B = _lightest(np.bincount(group_B, length_B), ranks)[group_B]
    if np.bincount(owner_B, length_B, ranks).max() > 1.1 * length_B.sum() / ranks:
        owner_B = _lightest(length_B, ranks)
    works = [SequenceWork.of(batch.select(np.flatnonzero(owner_B == rank)), size=size) for rank in range(ranks)]
    return [(work, _first_fit(work, budget)) for work in works]


def as_rlctl(batch: Batch, size: DecoderSize, ranks: int, budget: int) -> list[tuple[SequenceWork, Parts]]:
    works = [
        SequenceWork.of(batch.select(share), size=size) for share in shards(SequenceWork.of(batch, size=size), ranks)
    ]
    found = [fewest_rows(work, budget) for work in works]
    rounds = max(map(len, found))
    even = [even_rows(work, budget, parts, rounds) for work, parts in zip(works, found, strict=True)]
    flops = [[work.flops(part) for part in parts] for work, parts in zip(works, even, strict=True)]
    heaviest = [max(mine[number] for mine in flops if number < len(mine)) for number in range(rounds)]
    return [(work, in_step(work, budget, parts, heaviest)) for work, parts in zip(works, even, strict=True)]


def _lightest(load_N: NDArray[np.int64], ranks: int) -> NDArray[np.int64]:
    owner_N, heap = np.zeros(len(load_N), dtype=np.int64), [(0, rank) for rank in range(ranks)]
    for item in np.argsort(-load_N, kind="stable").tolist():
        load, rank = heap[0]
        owner_N[item] = rank
        heapq.heapreplace(heap, (load + int(load_N[item]), rank))
    return owner_N


def _first_fit(work: SequenceWork, budget: int) -> Parts:
    families: dict[int, list[int]] = {}
    for sequence in work.computed.tolist():
        families.setdefault(int(work.family_B[sequence]), []).append(sequence)
    pieces: Parts = []
    for family in families.values():
        piece: list[int] = []
        for sequence in sorted(family, key=lambda each: -work.rows_B[each]):
            if piece and work.rows([*piece, sequence]) > budget:
                pieces.append(piece)
                piece = []
            piece.append(sequence)
        pieces.append(piece)
    parts, room = [], []
    for piece in sorted(pieces, key=lambda each: -work.rows(each)):
        rows = work.rows(piece)
        at = next((at for at, free in enumerate(room) if free >= rows), len(room))
        if at == len(room):
            parts.append([])
            room.append(budget)
        parts[at] += piece
        room[at] -= rows
    return parts


# ── what comes of it ──────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Figures:
    imbalance: float
    lock_step: float
    rounds: int
    idle: int
    waste: float
    sdpa: float

    @staticmethod
    def of(batch: Batch, size: DecoderSize, packed: Sequence[tuple[SequenceWork, Parts]]) -> Figures:
        whole = SequenceWork.of(batch, size=size)
        flops = [sorted((work.flops(part) for part in parts), reverse=True) for work, parts in packed]
        average = sum(map(sum, flops)) / len(flops)
        rounds = max(map(len, flops))
        heaviest = [max(mine[number] for mine in flops if number < len(mine)) for number in range(rounds)]
        idle = sum(rounds - len(mine) for mine in flops)
        rows = sum(work.rows(part) for work, parts in packed for part in parts) + 2 * idle
        sdpa = sum(_sdpa_flops(size, work, part) for work, parts in packed for part in parts)
        return Figures(
            imbalance=max(map(sum, flops)) / average,
            lock_step=sum(heaviest) / average,
            rounds=rounds,
            idle=idle,
            waste=rows / whole.rows(whole.computed) - 1,
            sdpa=sdpa / sum(map(sum, flops)),
        )


def _sdpa_flops(size: DecoderSize, work: SequenceWork, part: list[int]) -> float:
    """What attention computes beyond what tokens see, of a layout of `backends/packed/layout.py`."""
    from backends.packed.layout import _groups_of_like_length

    lengths = np.sort(work.rows_B[part])[::-1]
    filled = _groups_of_like_length(lengths.tolist(), 0.65)
    attention = DecoderSize(size.layers, size.heads, size.head_size, 0, 0)
    padded = sum(count * float(attention.sequence_flops(longest)) for count, longest in filled)
    _, first = np.unique(work.family_B[part], return_index=True)
    repeated = np.delete(np.array(part), first)
    needed = attention.sequence_flops(lengths).sum() - attention.sequence_flops(work.prompt_B[repeated]).sum()
    return padded - float(needed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="7B", help="of the model, Qwen2's")
    parser.add_argument("--budget", type=int, default=BUDGET, help="tokens of a micro-batch")
    parser.add_argument("--data", type=Path, default=os.environ.get("RLCTL_TEST_DATA"), help="folder with gsm8k/")
    args = parser.parse_args()
    size = DecoderSize.of(SHAPES[args.shape])
    assert size is not None
    kinds: dict[str, Callable[[int, int, int], Lengths]] = {}
    if args.data is not None:
        kinds["GSM8K"] = gsm8k(Path(args.data) / "gsm8k" / "train.jsonl")
    kinds |= {"long tail": long_tail, "two kinds": two_kinds, "even": even_lengths}
    print(f"{args.shape}, at most {args.budget} tokens in a micro-batch; plain → rlctl, the mean of 5 batches\n")
    print(
        "| lengths | groups × size | ranks | imbalance | lock step | rounds | idle | waste | sdpa |\n"
        + "|---" * 9
        + "|"
    )
    for name, draw in kinds.items():
        for groups, members, ranks in ((16, 8, 2), (64, 8, 4), (64, 8, 8), (256, 4, 16), (128, 16, 64)):
            print(_line(name, draw, groups, members, ranks, size, args.budget))
    print("\nOne rank, 16,384 sequences; CPU time of one thread, ms\n")
    print("| lengths | groups × size | micro-batches | to ranks | plain | rlctl |\n" + "|---" * 6 + "|")
    for name, draw in kinds.items():
        for groups, members in ((2048, 8), (16384, 1)):
            print(_timed(name, make_batch(draw(groups, members, 0)), groups, members, size, args.budget))


def _line(
    name: str,
    draw: Callable[[int, int, int], Lengths],
    groups: int,
    members: int,
    ranks: int,
    size: DecoderSize,
    budget: int,
) -> str:
    batches = [make_batch(draw(groups, members, seed)) for seed in range(5)]
    pair = [
        [Figures.of(batch, size, way(batch, size, ranks, budget)) for batch in batches] for way in (plain, as_rlctl)
    ]

    def cell(field: str, shown: str) -> str:
        means = [np.mean([getattr(figures, field) for figures in side]) for side in pair]
        return " → ".join(format(mean, shown) for mean in means)

    cells = [cell("imbalance", ".3f"), cell("lock_step", ".3f"), cell("rounds", ".1f"), cell("idle", ".1f")]
    return (
        f"| {name} | {groups} × {members} | {ranks} | "
        + " | ".join([*cells, cell("waste", ".2%"), cell("sdpa", ".1%")])
        + " |"
    )


def _timed(name: str, batch: Batch, groups: int, members: int, size: DecoderSize, budget: int) -> str:
    start = time.thread_time()
    shards(SequenceWork.of(batch, size=size), 8)
    shared = time.thread_time()
    _first_fit(SequenceWork.of(batch, size=size), budget)
    plain_done = time.thread_time()
    work = SequenceWork.of(batch, size=size)
    parts = even_rows(work, budget, fewest_rows(work, budget), 0)
    done = time.thread_time()
    spent = [f"{1000 * seconds:.0f}" for seconds in (shared - start, plain_done - shared, done - plain_done)]
    return f"| {name} | {groups} × {members} | {len(parts)} | " + " | ".join(spent) + " |"


if __name__ == "__main__":
    main()
