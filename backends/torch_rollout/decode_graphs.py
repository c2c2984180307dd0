"""Decode steps as CUDA graphs: a small model's step costs launches, and a graph launches all of its kernels at once."""

from __future__ import annotations

from collections import Counter

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from backends.packed.staging import Staging
from backends.torch_rollout.kv_cache import KvCache, SlotSegment
from backends.torch_rollout.runner import Forward

EAGER_STEPS = 4  # of a size, before its graph is captured: capturing takes about as long as these save
LEAST_LENGTH = 128  # cached positions that a graph reads


class DecodeGraphs:
    """Graphs of one cache by size: slots and cached positions, each rounded up to a power of two.

    Slots past the active ones write to positions that nobody reads, and what lies past a sequence's end is masked.
    The graphs hold the addresses of weights and cache, so they are dropped when either moves.
    """

    def __init__(self, forward: Forward, cache: KvCache, vocab: int, *, captured: bool = True) -> None:
        """`captured` False runs the padded step without a graph, which shows on a CPU that it is right."""
        self._forward, self._cache, self._captured = forward, cache, captured
        self._steps: Counter[tuple[int, int]] = Counter()
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self._input = torch.zeros(2, cache.slots, dtype=torch.int64, device=cache.device)  # tokens, positions
        self._logits = torch.empty(cache.slots, vocab, dtype=cache.dtype, device=cache.device)
        self._pool = torch.cuda.graph_pool_handle() if captured else None

    def run(self, packed: NDArray[np.int64], staging: Staging) -> Tensor | None:
        """Decode one token of the first n slots; return their logits [n, V], which the next call overwrites.

        `packed` [2, n]: tokens and positions. None: a size that is still too rare for a graph.
        """
        count = packed.shape[1]
        slots = min(_rounded_up(count), self._cache.slots)
        length = min(_rounded_up(max(int(packed[1].max()) + 1, LEAST_LENGTH)), self._cache.max_len)
        self._steps[slots, length] += 1
        if self._steps[slots, length] <= EAGER_STEPS:
            return None
        staged = staging.put(np.pad(packed, ((0, 0), (0, slots - count))))
        staging.send()
        self._input[:, :slots].copy_(staged)
        if not self._captured:
            self._step(slots, length)
            return self._logits[:count]
        if (slots, length) not in self._graphs:
            self._graphs[slots, length] = graph = torch.cuda.CUDAGraph()
            # Other threads of this process may use the device meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                self._step(slots, length)
        self._graphs[slots, length].replay()
        return self._logits[:count]

    def _step(self, slots: int, length: int) -> None:
        tokens, positions = self._input[:, :slots].unbind()
        ragged = np.zeros(slots, dtype=np.int64)
        self._cache.begin_step(ragged, positions, [SlotSegment(0, slots, length)])
        self._logits[:slots].copy_(self._forward(tokens, positions, self._cache))


def _rounded_up(count: int) -> int:
    """Return the next power of two."""
    return 1 << (count - 1).bit_length()
