"""Random numbers that depend on (seed, sample id, position) and on nothing else.

A counter-based generator (Salmon et al. 2011) in its simplest form: the finaliser of SplitMix64 (Steele et al. 2014)
over a key and a counter. So a sample comes out the same on any replica, in any slot, next to any neighbours, on CPU
or GPU: numpy computes the few numbers of a step on the host.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_STRIDE = np.uint64(0x9E3779B97F4A7C15)
_MIX_A = np.uint64(0xBF58476D1CE4E5B9)
_MIX_B = np.uint64(0x94D049BB133111EB)


def sample_keys(seed: int, id_B: NDArray[np.int64]) -> NDArray[np.uint64]:
    """One key per sample id (any int64), for `uniform`."""
    seed_key = _mix(np.array([seed], dtype=np.int64).view(np.uint64) + _STRIDE)
    return _mix(_mix(id_B.astype(np.int64).view(np.uint64) + _STRIDE) + seed_key * _STRIDE)


def uniform(key_B: NDArray[np.uint64], position_B: NDArray[np.int64]) -> NDArray[np.float64]:
    """Uniform in [0, 1) for each key at each position (0: first answer token), 52 bits.

    52 and not 53, so that `u * total < total` holds for every float64 `total` after rounding.
    """
    bits = _mix(key_B + (position_B.view(np.uint64) + np.uint64(1)) * _STRIDE)
    return (bits >> np.uint64(12)).astype(np.float64) * 2.0**-52


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * _MIX_A
    x = (x ^ (x >> np.uint64(27))) * _MIX_B
    return x ^ (x >> np.uint64(31))
