"""A checksum of weights that a device computes where they lie: 8 bytes leave it, whatever is hashed.

The words u of a weight are the 16-bit integers that its bytes in wire dtype make, in order (of a dtype of one byte,
its bytes). With B = 65,536, odd 64-bit keys `low` and `high` drawn once and for all, and arithmetic modulo 2^64,

    total = Σ u[g] · low[g mod B] · high[g div B]        checksum = mix(total + nbytes · odd), mix a bijection

Integer sums have no order: CPU and GPU find the same total, and parts of a weight, wherever they lie, add up to it.

What it notices:

- A change within one word, such as a flipped bit: always. An odd number times a difference below 2^16 is not 0.
- Two words of a block of B that change places: always. Keys in `low` differ modulo 2^49, and words by less than 2^16.
- Another length with the same total, such as zeros: always.
- Anything else that happens without a look at the keys (words of different blocks that change places, shifted rows,
  the weight of another step): all but one case in 2^(56 - v), where 2^v divides all differences of words; v ≤ 15.
  (The differences of a block times `low` add up to a multiple of 2^t in one case of 2^(t - v - 1); times an odd key
  that is the one value that hides the rest in one case of 2^(63 - t); summed over t.)

The keys are public, so it finds faults and not forgers, as xxh3 does. (Linear hashing: Carter and Wegman 1979,
"Universal classes of hash functions"; keys and `mix` are splitmix64's: Steele, Lea and Flood 2014.)

W: words, B: words of a block, R: blocks or rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor

from backends.protocol import WeightSpec
from backends.weights.checksum import hashing
from backends.weights.tensor_bytes import torch_dtype, typed
from specs.splitmix64 import GOLDEN, mix

_BLOCK_BITS = 16
BLOCK_WORDS = 1 << _BLOCK_BITS
_BLOCKS, _GPU_BLOCKS = 16, 128  # at once: products of 8 MiB, which a cache holds; of 64 MiB, for a GPU few kernels
_LOW_SEED, _HIGH_SEED = 1, 2
_TWO_64 = 1 << 64


def word_sums(tensors: Iterable[Tensor]) -> list[str]:
    """The checksum of each tensor, 16 hex digits. What is on a device is read from it together."""
    with hashing():
        held = list(tensors)
        totals = read_totals([total_of(tensor) for tensor in held])
        return [finish(total, tensor.nbytes) for total, tensor in zip(totals, held, strict=True)]


def wire_sums(weights: Iterable[tuple[WeightSpec, Tensor]]) -> list[str]:
    """The checksum of each weight from its bytes on the wire."""
    return word_sums([typed(buffer_U, torch_dtype(spec.dtype)) for spec, buffer_U in weights])


def total_of(tensor: Tensor) -> Tensor:
    """`total` of a tensor, on its device (int64, no dims)."""
    return _sum_of_run(_words(tensor), 0)


def total_of_part(part: Tensor, strides: Sequence[int], offset: int) -> Tensor:
    """Return what a part of a weight adds to its `total`: element [i, j, …] of `part` is element
    `offset` + i · strides[0] + j · strides[1] + … of the flattened weight."""
    run, outer = 1, part.ndim  # elements in a row in the weight, and the dims that go from run to run
    while outer and (part.shape[outer - 1] == 1 or strides[outer - 1] == run):
        outer -= 1
        run *= part.shape[outer]
    start_R = torch.full((1,), offset, dtype=torch.int64)
    for size, stride in zip(part.shape[:outer], strides[:outer], strict=True):
        start_R = (start_R[:, None] + torch.arange(size) * stride).view(-1)
    words_W = _words(part)
    per_element = len(words_W) // max(part.numel(), 1)
    if len(start_R) == 1:
        return _sum_of_run(words_W, offset * per_element)
    return _sum_of_runs(words_W.view(len(start_R), -1), start_R * per_element)


def read_totals(totals: Sequence[Tensor]) -> list[int]:
    """Totals from their device, in one copy."""
    found: list[int] = torch.stack(list(totals)).tolist() if totals else []
    return found


def finish(total: int, nbytes: int) -> str:
    """The checksum of a weight of `nbytes` bytes with this `total`, 16 hex digits."""
    return f"{int(mix(np.array([(total + nbytes * int(GOLDEN)) % _TWO_64], dtype=np.uint64))[0]):016x}"


def _words(tensor: Tensor) -> Tensor:
    flat = tensor.detach().contiguous().view(-1)
    return flat.view(torch.int8 if flat.itemsize == 1 else torch.int16)


def _sum_of_run(words_W: Tensor, start: int) -> Tensor:
    """The sum of words that are the weight's from `start` on: whole blocks together, and what is left at both ends."""
    first, last = start // BLOCK_WORDS, (start + len(words_W)) // BLOCK_WORDS
    low_B, high_R = _keys(words_W.device, last + 1)
    before = min(-start % BLOCK_WORDS, len(words_W))
    total = torch.zeros((), dtype=torch.int64, device=words_W.device)
    if before:
        total += (words_W[:before] * low_B[start % BLOCK_WORDS :][:before]).sum() * high_R[first]
    whole_RB = words_W[before:][: (len(words_W) - before) // BLOCK_WORDS * BLOCK_WORDS].view(-1, BLOCK_WORDS)
    high_of_R = high_R[last - len(whole_RB) : last]
    blocks = _blocks_at_once(words_W.device)
    for row in range(0, len(whole_RB), blocks):
        some = slice(row, row + blocks)
        total += ((whole_RB[some] * low_B).sum(1) * high_of_R[some]).sum()
    after_W = words_W[before + whole_RB.numel() :]
    if len(after_W):
        total += (after_W * low_B[: len(after_W)]).sum() * high_R[last]
    return total


def _sum_of_runs(words_RW: Tensor, start_R: Tensor) -> Tensor:
    """The sum of runs of equal length, each of which is the weight's from its own `start` on. Keys are looked up word
    by word: a few times slower than one run."""
    device, width = words_RW.device, words_RW.shape[1]
    low_B, high_R = _keys(device, (int(start_R.max()) + width) // BLOCK_WORDS + 1)
    total = torch.zeros((), dtype=torch.int64, device=device)
    start_R, step_W = start_R.to(device), torch.arange(width, device=device)
    rows = max(1, _blocks_at_once(device) * BLOCK_WORDS // max(width, 1))
    for row in range(0, len(words_RW), rows):
        some = slice(row, row + rows)
        place_RW = start_R[some, None] + step_W
        key_RW = low_B[place_RW & (BLOCK_WORDS - 1)] * high_R[place_RW >> _BLOCK_BITS]
        total += (words_RW[some] * key_RW).sum()
    return total


def _blocks_at_once(device: torch.device) -> int:
    return _BLOCKS if device.type == "cpu" else _GPU_BLOCKS


def _keys(device: torch.device, blocks: int) -> tuple[Tensor, Tensor]:
    """`low`, and at least the first `blocks` of `high`."""
    return _low(device), _high(device, 1 << max(10, math.ceil(math.log2(blocks))))


@cache
def _low(device: torch.device) -> Tensor:
    return _drawn(_LOW_SEED, BLOCK_WORDS).to(device)


@cache
def _high(device: torch.device, count: int) -> Tensor:
    return _drawn(_HIGH_SEED, count).to(device)


def _drawn(seed: int, count: int) -> Tensor:
    """The first `count` odd numbers of a stream."""
    state = np.arange(1, count + 1, dtype=np.uint64) * GOLDEN + np.uint64(seed)
    return torch.from_numpy((mix(state) | np.uint64(1)).view(np.int64))
