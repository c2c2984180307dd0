"""A model that an engine has made itself: packed rows against single sequences."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from backends.packed.packing import MicroBatch
from backends.train.verify_packing import verify_own_packing
from specs.errors import ModelError


def sums_of_sequences(micro: MicroBatch) -> Tensor:
    """Of the ids so far, in a segment's own sequence: a causal model that keeps sequences apart."""
    ends: list[float] = []
    found = []
    start = 0
    for length, parent in zip(micro.lengths, micro.parents, strict=True):
        before = 0.0 if parent < 0 else ends[parent]
        sums = before + torch.from_numpy(micro.tokens_T[start : start + length]).cumsum(0).float()
        found.append(sums)
        ends.append(float(sums[-1]))
        start += length
    return torch.cat(found)[torch.from_numpy(micro.hidden_N)]


def sums_of_rows(micro: MicroBatch) -> Tensor:
    return torch.from_numpy(micro.tokens_T).cumsum(0).float()


def test_a_model_that_mixes_the_sequences_of_a_row_is_refused() -> None:
    verify_own_packing(sums_of_sequences, "A", vocabulary=9, dtype=torch.float32, scores=False)
    with pytest.raises(ModelError, match=r"A gives other logits on packed sequences than one by one"):
        verify_own_packing(sums_of_rows, "A", vocabulary=9, dtype=torch.float32, scores=False)
