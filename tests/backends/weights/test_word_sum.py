"""The checksum that is computed on a device: as it is defined, and what it must notice."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from backends.weights import word_sum
from backends.weights.word_sum import BLOCK_WORDS, finish, read_totals, total_of, total_of_part, word_sums

# One word, less than a block, a block, and what ends within another.
LENGTHS = [1, 999, BLOCK_WORDS - 1, BLOCK_WORDS, BLOCK_WORDS + 1, 2 * BLOCK_WORDS + 7]
GOLDEN = 0x9E3779B97F4A7C15


def numbers(count: int, seed: int = 0) -> NDArray[np.int16]:
    return np.random.default_rng(seed).integers(-(2**15), 2**15, count).astype(np.int16)


def of(words: NDArray[np.int16]) -> str:
    return word_sums([torch.from_numpy(words.copy())])[0]


def drawn(seed: int, count: int) -> list[int]:
    """splitmix64 as its authors wrote it, made odd."""
    found = []
    for number in range(1, count + 1):
        z = (number * GOLDEN + seed) % 2**64
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        found.append(z ^ (z >> 31) | 1)
    return found


@pytest.mark.parametrize("count", [0, *LENGTHS, 18 * BLOCK_WORDS + 7])
def test_it_is_as_defined(count: int) -> None:
    """In whole numbers without end, one by one."""
    words, low, high = numbers(count).tolist(), drawn(1, BLOCK_WORDS), drawn(2, 32)
    total = sum(u * low[g % BLOCK_WORDS] * high[g // BLOCK_WORDS] for g, u in enumerate(words))
    assert read_totals([total_of(torch.tensor(words, dtype=torch.int16))])[0] % 2**64 == total % 2**64
    state = (total + 2 * count * GOLDEN) % 2**64
    mixed = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB % 2**64
    assert finish(total, 2 * count) == f"{mixed ^ (mixed >> 31):016x}" == of(numbers(count))


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(LENGTHS), st.data())
def test_a_flipped_bit_shows(count: int, data: st.DataObject) -> None:
    words = numbers(count)
    changed = words.copy()
    changed.view(np.uint16)[data.draw(st.integers(0, count - 1))] ^= np.uint16(1 << data.draw(st.integers(0, 15)))
    assert of(changed) != of(words)


def test_no_two_words_of_a_block_can_change_places_unseen() -> None:
    """What the docstring builds on, of the keys that there are."""
    low = word_sum._drawn(1, BLOCK_WORDS).numpy().view(np.uint64)
    assert (low % np.uint64(2) == 1).all()
    assert len(np.unique(low % np.uint64(2**49))) == BLOCK_WORDS
    high = word_sum._drawn(2, 1 << 17).numpy().view(np.uint64)
    assert (high % np.uint64(2) == 1).all()
    assert len(np.unique(high)) == len(high)


def cuts(whole: Tensor) -> Iterator[list[Tensor]]:
    """Parts as tensor parallelism makes them of a matrix, and others."""
    yield [whole]
    yield [whole[:100], whole[100:101], whole[101:]]
    yield [whole[:, :17], whole[:, 17:]]
    yield [whole[:70, :5], whole[70:, :5], whole[:, 5:]]
    yield [whole.T[:9], whole.T[9:]]
    yield [whole.view(3, 47, -1)[:, 1:], whole.view(3, 47, -1)[:, :1]]
    yield [whole.view(-1)[1::2], whole.view(-1)[::2]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_parts_add_up_wherever_they_lie(dtype: torch.dtype) -> None:
    whole = (torch.randn(141, 1031, generator=torch.Generator().manual_seed(1)) * 50).to(dtype)
    want = int(total_of(whole))
    for parts in cuts(whole):
        copies = [(part.clone(memory_format=torch.contiguous_format), part) for part in parts]
        found = [int(total_of_part(copy, part.stride(), part.storage_offset())) for copy, part in copies]
        assert finish(sum(found), whole.nbytes) == finish(want, whole.nbytes)
        if len(parts) > 1:
            assert (sum(found[1:]) - want) % 2**64, "a part that is not there must show"
