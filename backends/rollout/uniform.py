"""Random numbers that depend on (seed, sample id, position) and on nothing else.

The position of a token is how many tokens its sample has drawn before it, in earlier calls too (`position_B`): tokens
that a tool wrote do not count, and the second turn of a rollout does not repeat the numbers of the first.

A counter-based generator (Salmon et al. 2011) in its simplest form: the finaliser of SplitMix64 (Steele et al. 2014)
over a key and a counter. So a sample comes out the same on any replica, in any slot, next to any neighbours, on CPU
or GPU: numpy computes the few numbers of a step on the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from backends.completions import SampleRequest
from specs.splitmix64 import GOLDEN, mix


def sample_keys(seed: int | NDArray[np.int64], id_B: NDArray[np.int64]) -> NDArray[np.uint64]:
    """One key per sample id (any int64), for `uniform`. `seed`: of all, or of each."""
    seed_key = mix(np.atleast_1d(np.asarray(seed, dtype=np.int64)).view(np.uint64) + GOLDEN)
    return mix(mix(id_B.astype(np.int64).view(np.uint64) + GOLDEN) + seed_key * GOLDEN)


def request_keys(requests: Sequence[SampleRequest]) -> NDArray[np.uint64]:
    """One key per request, for `uniform`."""
    seeds = np.array([request.sampling.seed for request in requests], dtype=np.int64)
    return sample_keys(seeds, np.array([request.id for request in requests], dtype=np.int64))


def request_seeds(requests: Sequence[SampleRequest]) -> list[int]:
    """A seed of 63 bits for each request, for engines that draw with generators of their own: another one for each
    turn of a sample. Such an engine's draws do not continue where the last call ended; they start over, elsewhere."""
    key_B = request_keys(requests)
    position_B = np.array([request.position for request in requests], dtype=np.int64)
    turn_B = mix(key_B + position_B.view(np.uint64) * GOLDEN)
    seeds: list[int] = (np.where(position_B > 0, turn_B, key_B) >> np.uint64(1)).tolist()
    return seeds


def uniform(key_B: NDArray[np.uint64], position_B: NDArray[np.int64]) -> NDArray[np.float64]:
    """Uniform in [0, 1) for each key at each position (0: the first token that is drawn), 52 bits.

    52 and not 53, so that `u * total < total` holds for every float64 `total` after rounding.
    """
    bits = mix(key_B + (position_B.view(np.uint64) + np.uint64(1)) * GOLDEN)
    return (bits >> np.uint64(12)).astype(np.float64) * 2.0**-52
